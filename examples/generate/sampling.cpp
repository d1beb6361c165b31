#include "tessera/examples/generate/sampling.h"

#include <cmath>
#include <limits>
#include <stdexcept>

#include <fmt/format.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"

namespace {

double uniform(const tessera::DeviceMesh& mesh) {
  const tessera::Placements everywhere(static_cast<std::size_t>(mesh.ndim()), tessera::Replicate());
  return tessera::to_local(tessera::rand({1}, mesh, everywhere, at::kDouble)).item<double>();
}

at::Tensor probabilities(const at::Tensor& logits, const Sampling& sampling) {
  at::Tensor scores = logits.to(at::kDouble);
  if (sampling.top_k > 0 && sampling.top_k < scores.numel()) {
    const at::Tensor least = std::get<0>(scores.topk(sampling.top_k)).min();
    scores = scores.masked_fill(scores.lt(least), -std::numeric_limits<double>::infinity());
  }
  return scores.sub(scores.max()).div(sampling.temperature).softmax(0);
}

}  // namespace

int64_t choose_token(const at::Tensor& logits, const Sampling& sampling, const tessera::DeviceMesh& mesh) {
  if (!(sampling.temperature >= 0) || std::isinf(sampling.temperature)) {
    throw std::invalid_argument(
        fmt::format("generate: the temperature is {}; give 0, or a finite number above it", sampling.temperature));
  }
  const auto [largest, token] = logits.max(0);
  if (!std::isfinite(largest.item<double>())) {
    throw std::runtime_error(
        "generate: the model's logits are not finite; was the checkpoint saved by a run that diverged?");
  }
  if (sampling.temperature == 0) return token.item<int64_t>();
  const at::Tensor sums = probabilities(logits, sampling).cumsum(0);
  const double drawn = uniform(mesh) * sums[-1].item<double>();
  return sums.le(drawn).sum().item<int64_t>();
}
