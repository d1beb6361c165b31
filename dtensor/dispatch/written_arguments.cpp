#include "tessera/dtensor/dispatch/written_arguments.h"

#include <algorithm>
#include <stdexcept>

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include "tessera/dtensor/redistribute/route_execution.h"
#include "tessera/mesh/failing.h"

namespace tessera::dispatch {
namespace {

// Says whether two tensors have an element of memory in common. Of tensors with gaps that reach into each other this
// counts the elements; of those with elements of unlike sizes it is taken for granted.
bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const at::MemOverlapStatus status = at::get_overlap_status(a, b);
  if (status != at::MemOverlapStatus::TooHard) return status != at::MemOverlapStatus::No;
  if (!a.is_alias_of(b) || a.numel() == 0 || b.numel() == 0) return false;
  if (a.itemsize() != b.itemsize()) return true;
  const auto end = [](const at::Tensor& t) {
    return static_cast<int64_t>(
        at::detail::computeStorageNbytes(t.sizes(), t.strides(), /*itemsize=*/1, t.storage_offset()));
  };
  if (a.storage_offset() >= end(b) || b.storage_offset() >= end(a)) return false;
  const int64_t first = std::min(a.storage_offset(), b.storage_offset());
  const at::Tensor taken = at::zeros({std::max(end(a), end(b)) - first}, at::kByte);
  const auto part = [&](const at::Tensor& t) {
    return taken.as_strided(t.sizes(), t.strides(), t.storage_offset() - first);
  };
  part(a).fill_(1);
  return part(b).sum().item<int64_t>() > 0;
}

}  // namespace

void WrittenArguments::keep(Pieces& pieces) {
  for (const std::size_t arg : call_.traits.written_args) {
    for (std::size_t i = 0; i < call_.tensors.size(); ++i) {
      if (call_.tensors[i].arg != arg || !call_.tensors[i].tensor->defined()) continue;
      if (in_copies()) copy(i, pieces);
      arguments_.push_back({i, *call_.tensors[i].tensor});
    }
  }
}

// An argument that is written as two of them has one copy. Of two that overlap in another way each would be written
// without what is written into the other.
void WrittenArguments::copy(std::size_t i, Pieces& pieces) const {
  const at::Tensor& piece = detail::meta(*call_.tensors[i].tensor).local();
  for (const Argument& other : arguments_) {
    const at::Tensor& others = detail::meta(other.wrapper).local();
    if (!overlap(piece, others)) continue;
    const bool is_same = call_.tensors[i].spec == call_.tensors[other.index].spec &&
                         decision_.inputs[i] == decision_.inputs[other.index] && piece.strides() == others.strides() &&
                         piece.storage_offset() == others.storage_offset() && piece.is_conj() == others.is_conj() &&
                         piece.is_neg() == others.is_neg();
    if (!is_same) failing(decision_.first_spec->mesh.world(), call_.traits.name.c_str(), [this] { refuse_overlap(); });
    pieces[i] = pieces[other.index];
    return;
  }
  if (pieces[i].is_alias_of(piece)) pieces[i] = pieces[i].clone();
}

void WrittenArguments::refuse_overlap() const {
  throw std::invalid_argument(
      fmt::format("{}: two arguments that it writes overlap in memory, and it computes in copies of both, of which "
                  "each would lose what is written into the other; clone one of them, or write them by two calls",
                  call_.traits.name));
}

void WrittenArguments::check_size(const Argument& argument, const Pieces& pieces) const {
  const Spec& spec = *decision_.inputs[argument.index];
  const at::Tensor& piece = pieces[argument.index];
  if (piece.sizes() != at::IntArrayRef(spec.local_sizes)) refuse_sizes(call_.traits.name, piece.sizes(), spec.sizes);
}

void WrittenArguments::copy_back(const Pieces& pieces) const {
  const World::Scope scope(decision_.first_spec->mesh.world(), call_.traits.name.c_str());
  for (const auto& [index, wrapper] : arguments_) {
    const detail::Meta& meta = detail::meta(wrapper);
    const at::AutoDispatchBelowADInplaceOrView below;
    meta.local().copy_(redistribute_local(pieces[index], *decision_.inputs[index], meta.spec->placements));
  }
}

const at::Tensor* WrittenArguments::find(std::size_t i) const {
  for (const Argument& each : arguments_) {
    if (call_.traits.written_result(call_.tensors[each.index].arg) == static_cast<int>(i)) return &each.wrapper;
  }
  return nullptr;
}

}  // namespace tessera::dispatch
