#include "tessera/mesh/collectives/replicated_check.h"

#include <cstdint>
#include <functional>
#include <numeric>
#include <string_view>

#include <ATen/core/LegacyTypeDispatch.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/mesh/check_state.h"
#include "tessera/mesh/collectives/checked.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/core/backward_pass.h"
#include "tessera/mesh/core/in_memory.h"
#include "tessera/mesh/core/mismatch.h"
#include "tessera/mesh/values_on_host.h"

namespace tessera {
namespace {

uint64_t content_hash(const at::Tensor& tensor) {
  const at::Tensor plain = in_memory(tensor.detach()).contiguous().cpu();
  return std::hash<std::string_view>{}({static_cast<const char*>(plain.const_data_ptr()), plain.nbytes()});
}

}  // namespace

void check_replicated(const at::Tensor& plain, const DeviceMesh& mesh, const std::string& who) {
  std::vector<int64_t> all(static_cast<std::size_t>(mesh.ndim()));
  std::iota(all.begin(), all.end(), 0);
  check_replicated(plain, mesh, all, who);
}

void check_replicated(const at::Tensor& plain, const DeviceMesh& mesh, const std::vector<int64_t>& mesh_dims,
                      const std::string& who) {
  World& world = mesh.world();
  if (!Checked::enabled(world) || !mesh.is_member() || plain.layout() != at::kStrided) return;
  if (in_backward()) return;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const InsideCheck inside(world.check_state());
  const std::string text = fmt::format("{} ({}) of content {:016x}", c10::toString(plain.scalar_type()),
                                       fmt::join(plain.sizes(), ", "), content_hash(plain));
  const auto gather = [&](const at::Tensor& row) {
    at::Tensor rows = row.to(mesh.device()).unsqueeze(0);
    for (const int64_t dim : mesh_dims) rows = all_gather(rows, mesh, dim).flatten(0, 1);
    return values_on_host(rows, world);
  };
  try {
    check_alike(fmt::format("Checked: {}: a plain tensor that counts as replicated is not the same on every rank of {}",
                            who, mesh.to_string()),
                text, world.rank(), gather);
  } catch (const MismatchError& error) {
    world.note_mismatch(error.what());
    throw;
  }
}

}  // namespace tessera
