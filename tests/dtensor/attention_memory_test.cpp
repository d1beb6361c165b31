// Tests that attention with dropout takes memory for blocks of scores, and not for all of them.

#include <cstdint>
#include <optional>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/tests/dtensor/deferred/peak_memory.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/styles/fake_mesh.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr int64_t kRows = 2048, kWidth = 16, kHeads = 2;
constexpr int64_t kScores = kHeads * kRows * kRows * 4, kOperand = kHeads * kRows * kWidth * 4;  // bytes
constexpr int64_t kBlock = (1 << 20) * 4;                                                        // bytes, on the CPU

// Returns the peak of forward and backward. A mask that asks for a gradient is not served in blocks.
int64_t step_bytes(bool causal, bool mask_with_gradient) {
  const DeviceMesh mesh = fake_mesh(0, {1});
  const auto made = [&](int64_t seed) {
    return spread(sample({1, kHeads, kRows, kWidth}, seed, at::kFloat), mesh, {Replicate()}).requires_grad_(true);
  };
  const at::Tensor q = made(1), k = made(2), v = made(3);
  const at::Tensor mask = spread(sample({kRows, 1}, 4, at::kFloat), mesh, {Replicate()}).requires_grad_(true);
  const std::optional<at::Tensor> given = mask_with_gradient ? std::optional(mask) : std::nullopt;
  return peak_bytes([&] { at::scaled_dot_product_attention(q, k, v, given, 0.1, causal).sum().backward(); });
}

}  // namespace

TEST_CASE("peak memory of attention with dropout, forward and backward: some blocks, and not all scores") {
  const int64_t blocks = step_bytes(false, false), causal = step_bytes(true, false), whole = step_bytes(false, true);
  MESSAGE("all scores: ", kScores, " bytes; in blocks ", blocks, ", causal ", causal, ", at once ", whole);
  CHECK(whole >= 2 * kScores);
  for (const int64_t peak : {blocks, causal}) CHECK(peak <= 5 * kBlock + 12 * kOperand);
}
