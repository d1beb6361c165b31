#include "tessera/dtensor/agreement.h"

#include <cstring>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>

#include <ATen/Functions.h>
#include <fmt/format.h>

#include "tessera/dtensor/over_meshes.h"
#include "tessera/mesh/check_state.h"
#include "tessera/mesh/core/deferred_tensor.h"
#include "tessera/mesh/core/error_text.h"
#include "tessera/mesh/values_on_host.h"
#include "tessera/mesh/world.h"

namespace tessera {
namespace {

constexpr std::size_t kLongestText = 1 << 14;

// Encodes how a part ended, to be sent: "" for success, else 'i' (invalid argument) or 'r' (runtime error) and the
// text.
std::string outcome_of(const std::function<void()>& part, std::exception_ptr& thrown) {
  try {
    part();
    return "";
  } catch (const std::logic_error& error) {
    thrown = std::current_exception();
    return std::string("i") + error.what();
  } catch (...) {
    thrown = std::current_exception();
    return "r" + current_error_text();
  }
}

}  // namespace

at::Tensor Agreement::reduce_max(const at::Tensor& values) const {
  return values_on_host(max_over_meshes(values, meshes_, op_), meshes_.front().world());
}

void Agreement::run(const std::function<void()>& part, const std::function<std::string()>& fingerprint,
                    const char* differ) const {
  std::exception_ptr thrown;
  int64_t print = 0;
  const auto both = [&] {
    std::optional<InsideCheck> unchecked;
    if (!meshes_.empty()) unchecked.emplace(meshes_.front().world().check_state());
    part();
    if (fingerprint)
      print = static_cast<int64_t>(std::hash<std::string>()(fingerprint()) >> 1);  // so that -print fits in int64
  };
  const std::string mine = outcome_of(both, thrown).substr(0, kLongestText);
  if (meshes_.empty()) {
    if (thrown) std::rethrow_exception(thrown);
    return;
  }
  const World& world = meshes_.front().world();
  const detail::NotDeferred own_tensors;
  const bool failed = !mine.empty();
  const int64_t code = failed ? world.size() - world.rank() : 0;  // the lowest rank has the largest code
  const std::vector<int64_t> sent = {code, static_cast<int64_t>(mine.size()), failed ? 0 : 1, print, -print};
  const at::Tensor all = reduce_max(at::tensor(sent, at::kLong));
  const auto* got = all.const_data_ptr<int64_t>();
  if (got[0] > 0) throw_alike(world.size() - got[0], got[1], got[2] == 0, mine);
  if (got[3] == -got[4]) return;
  throw std::invalid_argument(fmt::format("{}: {} (on {})", op_, differ, meshes_.front().to_string()));
}

void Agreement::throw_alike(int64_t first_rank, int64_t text_bytes, bool all_failed, const std::string& mine) const {
  at::Tensor text = at::zeros({text_bytes}, at::kByte);
  if (meshes_.front().world().rank() == first_rank) std::memcpy(text.mutable_data_ptr(), mine.data(), mine.size());
  text = reduce_max(text);
  std::string outcome(static_cast<const char*>(text.const_data_ptr()), static_cast<std::size_t>(text_bytes));
  outcome.erase(outcome.find_last_not_of('\0') + 1);
  const std::string message =
      all_failed ? outcome.substr(1) : fmt::format("rank {}: {}", first_rank, outcome.substr(1));
  if (outcome.front() == 'i') throw std::invalid_argument(message);
  throw std::runtime_error(message);
}

}  // namespace tessera
