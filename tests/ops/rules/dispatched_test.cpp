#include <random>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <fmt/format.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/ops/rules/pieces.h"
#include "tessera/tests/ops/rules/samples.h"

// Runs the samples through the dispatcher and the local kernels, on real ranks.
namespace tessera::testing {
namespace {

Placement draw(const at::Tensor& t, std::mt19937& random) {
  const auto pick = static_cast<int64_t>(random() % static_cast<unsigned>(t.dim() + 2));
  if (pick < t.dim()) return Shard(pick);
  return pick == t.dim() || !can_be_partial(t.scalar_type(), ReduceOp::kSum) ? Replicate() : Partial();
}

at::Tensor spread(const at::Tensor& whole, const DeviceMesh& mesh, std::mt19937& random, std::string& layouts) {
  Placements placements;
  for (int64_t i = 0; i < mesh.ndim(); ++i) placements.push_back(draw(whole, random));
  layouts += to_string(placements);
  const auto pieces = distribute(whole, placements, mesh.mesh().shape());
  return from_local(pieces[static_cast<std::size_t>(world()->rank())].contiguous(), mesh, placements,
                    {.shape = whole.sizes().vec(), .stride = whole.contiguous().strides().vec()});
}

// Draws the same on every rank.
std::string run(const Sample& sample, const DeviceMesh& mesh, std::mt19937& random, std::string& layouts) {
  const Prepared prepared(sample);
  std::vector<at::Tensor> spread_out;
  for (const at::Tensor& t : prepared.tensors()) {
    spread_out.push_back(t.defined() ? spread(t, mesh, random, layouts) : t);
  }
  const at::NoGradGuard no_grad;
  const auto results = prepared.run(prepared.args_with(spread_out));
  for (std::size_t k = 0; k < results.size(); ++k) {
    const at::Tensor& whole = prepared.results()[k];
    if (results[k].defined() != whole.defined()) return fmt::format("result {} is defined or not", k);
    if (!whole.defined()) continue;
    const at::Tensor full = full_tensor(results[k]);
    if (full.sizes() != whole.sizes() || full.scalar_type() != whole.scalar_type()) {
      return fmt::format("result {} has other sizes or another dtype", k);
    }
    if (!prepared.random() && !same_values(full, whole)) return fmt::format("result {} has other values", k);
  }
  return {};
}

// The samples are random too, so they are made after the seed is set.
void check(std::vector<Sample> (*samples)(), const DeviceMesh& mesh, int times) {
  at::manual_seed(4);
  std::mt19937 random(4);
  for (const Sample& sample : samples()) {
    for (int i = 0; i < times; ++i) {
      std::string layouts;
      CAPTURE(sample.op);
      const std::string wrong = run(sample, mesh, random, layouts);
      CHECK_MESSAGE(wrong.empty(), fmt::format("{} of {}: {}", sample.op, layouts, wrong));
    }
  }
}

std::vector<Sample> aten_matmul_samples() {
  std::vector<Sample> samples = matmul_samples();
  std::erase_if(samples, [](const Sample& sample) { return !sample.rule.empty(); });
  return samples;
}

DeviceMesh make_mesh() {
  const int64_t n = world()->size();
  return n == 4 ? init_device_mesh("cpu", {2, 2}, {}, world()) : init_device_mesh("cpu", {n}, {}, world());
}

TESSERA_RANKS_TEST_CASE("views from any layouts give the whole's result", {2, 3, 4}) {
  check(view_samples, make_mesh(), 4);
}

TESSERA_RANKS_TEST_CASE("what joins, indexes and normalizes gives the whole's result from any layouts", {2, 3, 4}) {
  check(join_samples, make_mesh(), 4);
  check(indexing_samples, make_mesh(), 4);
  check(norm_samples, make_mesh(), 4);
}

TESSERA_RANKS_TEST_CASE("reductions from any layouts give the whole's result", {2, 3, 4}) {
  check(reduction_samples, make_mesh(), 4);
}

TESSERA_RANKS_TEST_CASE("softmax, norms, embeddings, losses and attention from any layouts give the whole's result",
                        {2, 3, 4}) {
  check(nn_samples, make_mesh(), 3);
}

TESSERA_RANKS_TEST_CASE("convolution and pooling from any layouts give the whole's result", {2, 3, 4}) {
  check(convolution_samples, make_mesh(), 4);
  check(pooling_samples, make_mesh(), 4);
}

TESSERA_RANKS_TEST_CASE("factories and pointwise operators from any layouts give the whole's result", {2, 3, 4}) {
  check(factory_samples, make_mesh(), 3);
  check(pointwise_samples, make_mesh(), 3);
}

TESSERA_RANKS_TEST_CASE("products from any layouts give the whole's result", {2, 3, 4}) {
  check(aten_matmul_samples, make_mesh(), 4);
}

TESSERA_RANKS_TEST_CASE("a tensor that was gathered is reshaped by its values, whatever its strides were", {2}) {
  const DeviceMesh mesh = make_mesh();
  const at::Tensor whole = at::arange(24, at::kDouble).view({4, 3, 2});
  const at::Tensor gathered = redistribute(distribute_tensor(whole, mesh, {Shard(0)}).transpose(1, 2), {Replicate()});
  CHECK(at::equal(full_tensor(gathered.reshape({2, 2, 2, 3})), whole.transpose(1, 2).reshape({2, 2, 2, 3})));
}

}  // namespace
}  // namespace tessera::testing
