#include "tessera/tests/everyday/outcome.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/tests/ops/rules/pieces.h"

namespace tessera::testing {

at::Tensor whole_of(const at::Tensor& t) { return t.defined() && is_dtensor(t) ? full_tensor(t) : t; }

at::Tensor loss_of(const Tensors& results) {
  at::Tensor out;
  for (const at::Tensor& r : results) {
    if (!r.defined() || !r.requires_grad() || r.numel() == 0) continue;
    const at::Tensor each = (r * at::arange(1, r.numel() + 1, r.scalar_type()).cos().view(r.sizes())).sum();
    out = out.defined() ? out + each : each;
  }
  return out;
}

std::string compare(const Outcome& mine, const Outcome& plain) {
  if (mine.results.size() != plain.results.size()) return "other results";
  for (std::size_t k = 0; k < plain.results.size(); ++k) {
    if (!same_values(mine.results[k], plain.results[k].detach())) return fmt::format("result {} has other values", k);
  }
  if (mine.grads.size() != plain.grads.size()) return "gradients or none";
  for (std::size_t k = 0; k < plain.grads.size(); ++k) {
    const at::Tensor& whole = plain.grads[k];
    if (!whole.defined() && (!mine.grads[k].defined() || mine.grads[k].abs().max().item<double>() == 0)) continue;
    if (!whole.defined() || !mine.grads[k].defined()) return fmt::format("gradient {} is there or not", k);
    if (!same_values(mine.grads[k], whole)) return fmt::format("gradient {} has other values", k);
  }
  return {};
}

std::string message(const std::exception& error) {
  try {
    std::rethrow_if_nested(error);
  } catch (const std::exception& nested) {
    return message(nested);
  } catch (...) {
  }
  return error.what();
}

}  // namespace tessera::testing
