// Tests Megatron-Core's functions of document 001, with each of their parameters, against one process.

#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/mappings.h"
#include "tessera/layers/broadcast_data.h"
#include "tessera/layers/parallel_attributes.h"
#include "tessera/layers/parallel_dim.h"
#include "tessera/layers/sharded_linear.h"
#include "tessera/layers/tensor_chunks.h"
#include "tessera/layers/vocab_range.h"
#include "tessera/tests/coming_from/one_process.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

at::Tensor part(const at::Tensor& whole, int64_t dim, const DeviceMesh& mesh) {
  return piece_of(whole, mesh, {Shard(dim)});
}

// Compares losses and gradients with Megatron's formula in one process: 1 - a for the target's probability, and a / (K
// - 1) for every other class.
void check_loss(const at::Tensor& logits, const at::Tensor& target, double a, const DeviceMesh& mesh) {
  const int64_t last = logits.dim() - 1;
  const at::Tensor whole = leaf(logits), mine = leaf(part(logits, last, mesh)), log = whole.log_softmax(-1);
  const at::Tensor of_target = log.gather(-1, target.unsqueeze(-1)).squeeze(-1);
  const double other = a / static_cast<double>(logits.size(-1) - 1);
  const at::Tensor want = -((1 - a) * of_target + other * (log.sum(-1) - of_target));
  const at::Tensor got = vocab_parallel_cross_entropy(mine, target, mesh, a), g = sample(want.sizes(), 2);
  CHECK(close(got.detach(), want.detach()));
  want.backward(g);
  got.backward(g);
  CHECK(close(mine.grad(), part(whole.grad(), last, mesh)));
}

}  // namespace

TESSERA_RANKS_TEST_CASE("vocab_parallel_cross_entropy", {2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor logits = sample({5, 2, 12}) * 4, target = at::remainder(at::arange(10) * 5, 12).view({5, 2});
  SUBCASE("vocab_parallel_logits") {
    check_loss(logits, target, 0, mesh);
    check_loss(logits[0][0], target[0][0], 0, mesh);
    check_loss(logits * 200, target, 0, mesh);
  }
  SUBCASE("target") {
    for (int64_t id = 0; id < 12; ++id) check_loss(logits, at::full({5, 2}, id, at::kLong), 0, mesh);
  }
  SUBCASE("label_smoothing") {
    for (const double smoothing : {0.1, 0.5}) check_loss(logits, target, smoothing, mesh);
  }
}

TESSERA_RANKS_TEST_CASE("broadcast_data", {2}) {
  const DeviceMesh mesh = line();
  const bool first = mesh.local_rank(0) == 0;
  // Other ranks have other values, which are ignored.
  const std::map<std::string, at::Tensor> data = {{"tokens", at::arange(6).view({2, 3}) + (first ? 0 : 7)},
                                                  {"labels", at::full({}, first ? 3 : 4, at::kLong)},
                                                  {"mask", sample({3}, first ? 0 : 1)}};
  SUBCASE("keys") {
    for (const std::string key : {"tokens", "labels"}) {
      const auto got = broadcast_data({key}, data, at::kLong, mesh);
      CHECK(got.size() == 1);
      CHECK(got.contains(key));
    }
    CHECK_THROWS_WITH_AS(broadcast_data({"ids"}, data, at::kLong, mesh), doctest::Contains("no tensor \"ids\""),
                         std::invalid_argument);
  }
  SUBCASE("data") {
    const auto got =
        broadcast_data({"tokens", "labels"}, first ? data : std::map<std::string, at::Tensor>(), at::kLong, mesh);
    CHECK(same(got.at("tokens"), at::arange(6).view({2, 3})));
    CHECK(same(got.at("labels"), at::full({}, 3, at::kLong)));
  }
  SUBCASE("datatype") {
    CHECK(same(broadcast_data({"mask"}, data, at::kDouble, mesh).at("mask"), sample({3})));
    CHECK_THROWS_WITH_AS(broadcast_data({"mask"}, data, at::kLong, mesh),
                         doctest::Contains("mask has data type Double which is different than Long"),
                         std::invalid_argument);
  }
}

namespace {

// A linear function whose weight's rows are sharded, and the same in one process.
struct Linear {
  Linear(const DeviceMesh& mesh, const ShardedLinearOptions& given, std::vector<int64_t> sizes = {12, 5},
         bool biased = true)
      : mesh(mesh),
        options(given),
        x(leaf(sample(sizes, 1))),
        w(leaf(sample({24, sizes.back()}, 2))),
        b(leaf(sample({24}, 3))),
        my_x(leaf(options.sequence_parallel ? part(x, 0, mesh) : x)),
        my_w(leaf(part(w, 0, mesh))),
        my_b(leaf(part(b, 0, mesh))) {
    want = at::linear(x, w, biased ? std::make_optional(b) : std::nullopt);
    got = sharded_linear(my_x, my_w, biased ? my_b : at::Tensor(), mesh, options);
  }

  void check_result() const { CHECK(close(got.detach(), part(want.detach(), want.dim() - 1, mesh))); }

  void backward() const {
    const at::Tensor g = sample(want.sizes(), 4);
    want.backward(g);
    got.backward(part(g, g.dim() - 1, mesh));
  }
  void check_input_gradient() const {
    CHECK(close(my_x.grad(), options.sequence_parallel ? part(x.grad(), 0, mesh) : x.grad()));
  }
  void check_bias_gradient() const { CHECK(close(my_b.grad(), part(b.grad(), 0, mesh))); }

  // Checks that the weight's gradient is in `.grad`, in main_grad, which held ones, or nowhere.
  void check_weight_gradient() const {
    const bool frozen = options.frozen_weight, added = !frozen && options.main_grad.defined();
    CHECK(my_w.grad().defined() == (!frozen && !added));
    if (my_w.grad().defined()) CHECK(close(my_w.grad(), part(w.grad(), 0, mesh)));
    if (!options.main_grad.defined()) return;
    CHECK(close(options.main_grad, added ? part(w.grad(), 0, mesh) + 1 : at::ones_like(options.main_grad)));
  }
  void check_gradients() const {
    backward();
    check_input_gradient();
    check_weight_gradient();
    check_bias_gradient();
  }

  DeviceMesh mesh;
  ShardedLinearOptions options;
  at::Tensor x, w, b, my_x, my_w, my_b, want, got;
};

// Checks the parameters that both functions have, `frozen` or not.
void check_parameters(bool frozen, const DeviceMesh& mesh) {
  ShardedLinearOptions options{.reduce_input_gradient = true, .frozen_weight = frozen};
  SUBCASE("input") {
    for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{{5}, {4, 7}, {2, 3, 5}}) {
      const Linear linear(mesh, options, sizes);
      linear.check_result();
      linear.backward();
      linear.check_input_gradient();
    }
  }
  SUBCASE("weight") {
    const Linear linear(mesh, options);
    linear.check_result();
    linear.backward();
    linear.check_weight_gradient();
  }
  SUBCASE("bias") {
    const Linear linear(mesh, options);
    linear.backward();
    linear.check_bias_gradient();
    Linear(mesh, options, {12, 5}, /*biased=*/false).check_result();
  }
  SUBCASE("gradient_accumulation_fusion") {  // a frozen weight has no gradient to add
    options.main_grad = at::ones({24 / mesh.size(), 5}, at::kDouble);
    Linear(mesh, options).check_gradients();
  }
  SUBCASE("async_grad_allreduce") {
    options.reduce_input_gradient = false;  // this rank's term alone
    const Linear linear(mesh, options);
    linear.backward();
    const at::Tensor g = part(sample({12, 24}, 4), 1, mesh);
    CHECK(close(linear.my_x.grad(), at::matmul(g, linear.my_w.detach())));
    options.reduce_input_gradient = true;
    Linear(mesh, options).check_gradients();
  }
  SUBCASE("sequence_parallel") {
    options.sequence_parallel = true;
    const Linear linear(mesh, options, {12, 3, 5});
    linear.check_result();
    linear.check_gradients();
  }
}

}  // namespace

TESSERA_RANKS_TEST_CASE("LinearWithFrozenWeight", {1, 3}) {
  const Linear linear(line(), {.reduce_input_gradient = true, .frozen_weight = true});
  SUBCASE("forward") { linear.check_result(); }
  SUBCASE("backward") { linear.check_gradients(); }
}

TESSERA_RANKS_TEST_CASE("linear_with_frozen_weight", {1, 3}) { check_parameters(/*frozen=*/true, line()); }

TESSERA_RANKS_TEST_CASE("LinearWithGradAccumulationAndAsyncCommunication", {3}) {
  const DeviceMesh mesh = line();
  const at::Tensor main_grad = at::ones({24 / mesh.size(), 5}, at::kDouble);
  const Linear linear(mesh, {.reduce_input_gradient = true, .main_grad = main_grad});
  SUBCASE("forward") { linear.check_result(); }
  SUBCASE("backward") { linear.check_gradients(); }
}

TESSERA_RANKS_TEST_CASE("linear_with_grad_accumulation_and_async_allreduce", {3}) {
  check_parameters(/*frozen=*/false, line());
}

TEST_CASE("set_tensor_model_parallel_attributes") {
  const at::Tensor t = at::ones({4, 6}), other = at::ones({4, 6});
  SUBCASE("tensor") {
    set_tensor_parallel_attributes(t, true, 1, 2);
    CHECK(tensor_parallel_attributes(t) ==
          TensorParallelAttributes{.is_parallel = true, .partition_dim = 1, .partition_stride = 2});
    CHECK(tensor_parallel_attributes(other) == TensorParallelAttributes());
  }
  SUBCASE("is_parallel") {
    set_tensor_parallel_attributes(t, true, 0);
    set_tensor_parallel_attributes(other, false, -1);
    CHECK(tensor_parallel_attributes(t).is_parallel);
    CHECK_FALSE(tensor_parallel_attributes(other).is_parallel);
  }
  SUBCASE("dim") {
    set_tensor_parallel_attributes(t, true, 0);
    set_tensor_parallel_attributes(other, true, 1);
    CHECK(tensor_parallel_attributes(t).partition_dim == 0);
    CHECK(tensor_parallel_attributes(other).partition_dim == 1);
  }
  SUBCASE("stride") {
    set_tensor_parallel_attributes(t, true, 0);
    set_tensor_parallel_attributes(other, true, 0, 3);
    CHECK(tensor_parallel_attributes(t).partition_stride == 1);
    CHECK(tensor_parallel_attributes(other).partition_stride == 3);
  }
}

TEST_CASE("set_defaults_if_not_set_tensor_model_parallel_attributes") {
  SUBCASE("tensor") {
    const at::Tensor unset = at::ones({4, 6}), set = at::ones({4, 6});
    set_tensor_parallel_attributes(set, true, 1, 2);
    set_defaults_if_not_set_tensor_parallel_attributes(unset);
    set_defaults_if_not_set_tensor_parallel_attributes(set);
    CHECK(tensor_parallel_attributes(set).partition_stride == 2);
    CHECK_THROWS_WITH_AS(
        set_tensor_parallel_attributes(unset, true, 0),  // the defaults are set now
        doctest::Contains("was set to be not parallel before, and now to be parallel along dimension 0"),
        std::invalid_argument);
  }
}

TEST_CASE("copy_tensor_model_parallel_attributes") {
  const TensorParallelAttributes columns{.is_parallel = true, .partition_dim = 1, .partition_stride = 2};
  const at::Tensor destination = at::ones({4, 6}), source = at::ones({4, 6}), unset = at::ones({4, 6});
  set_tensor_parallel_attributes(source, true, 1, 2);
  SUBCASE("destination_tensor") {
    copy_tensor_parallel_attributes(destination, source);
    CHECK(tensor_parallel_attributes(destination) == columns);
    CHECK(tensor_parallel_attributes(source) == columns);
  }
  SUBCASE("source_tensor") {
    copy_tensor_parallel_attributes(destination, unset);
    CHECK(tensor_parallel_attributes(destination) == TensorParallelAttributes());
    copy_tensor_parallel_attributes(source, unset);
    CHECK(tensor_parallel_attributes(source) == columns);
  }
}

TESSERA_RANKS_TEST_CASE("param_is_not_tensor_parallel_duplicate", {2}) {
  const DeviceMesh mesh = line();
  SUBCASE("param") {
    const bool first = mesh.local_rank(0) == 0;
    CHECK(is_not_tensor_parallel_duplicate(spread(sample({4}), mesh, {Shard(0)}), mesh));
    CHECK(is_not_tensor_parallel_duplicate(spread(sample({4}), mesh, {Replicate()}), mesh) == first);
    CHECK(is_not_tensor_parallel_duplicate(at::ones({2}), mesh) == first);
    const at::Tensor set = at::ones({2});
    set_tensor_parallel_attributes(set, true, 0);
    CHECK(is_not_tensor_parallel_duplicate(set, mesh));
  }
}

namespace {

// Holds what the tests of regions take: tensors that are the same on every rank, and one of which each rank has a row.
struct Regions {
  explicit Regions(const DeviceMesh& given) : mesh(given) {}
  DeviceMesh mesh;
  at::Tensor x = sample({12, 24}, 1), g = sample({12, 24}, 2), all = sample({mesh.size(), 12, 24}, 3);
  at::Tensor row = all[mesh.local_rank(0)], sum = all.sum(0);
  at::Tensor of(const at::Tensor& whole, int64_t dim) const { return part(whole, dim, mesh); }
};

void check_gather_from_sequence(const Regions& r) {
  check_region([&](const at::Tensor& t) { return gather_from_sequence_region(t, r.mesh); }, r.of(r.x, 0), r.x, r.row,
               r.of(r.sum, 0));
}

void check_reduce_scatter_to_sequence(const Regions& r) {
  check_region([&](const at::Tensor& t) { return reduce_scatter_to_sequence_region(t, r.mesh); }, r.row, r.of(r.sum, 0),
               r.of(r.g, 0), r.g);
}

// Returns the tensor and expert dimensions of a mesh as one.
DeviceMesh tensor_and_expert() { return init_device_mesh("cpu", {2, 2}, {"ep", "tp"}, world()).merged({0, 1}); }

}  // namespace

TESSERA_RANKS_TEST_CASE("copy_to_tensor_model_parallel_region", {3}) {
  const Regions r(line());
  SUBCASE("input_") {
    check_region([&](const at::Tensor& t) { return copy_to_region(t, r.mesh); }, r.x, r.x, r.row, r.sum);
  }
}

TESSERA_RANKS_TEST_CASE("gather_from_sequence_parallel_region", {3}) {
  const Regions r(line());
  SUBCASE("input_") { check_gather_from_sequence(r); }
  SUBCASE("tensor_parallel_output_grad") {  // false: every rank has the whole gradient
    check_region([&](const at::Tensor& t) { return gather_from_sequence_region(t, r.mesh, false); }, r.of(r.x, 0), r.x,
                 r.g, r.of(r.g, 0));
  }
}

TESSERA_RANKS_TEST_CASE("gather_from_sequence_parallel_region_to_moe", {4}) {
  SUBCASE("input_") { check_gather_from_sequence(Regions(tensor_and_expert())); }
}

TESSERA_RANKS_TEST_CASE("gather_from_tensor_model_parallel_region", {3}) {
  const Regions r(line());
  SUBCASE("input_") {
    check_region([&](const at::Tensor& t) { return gather_from_region(t, r.mesh); }, r.of(r.x, 1), r.x, r.g,
                 r.of(r.g, 1));
  }
}

TESSERA_RANKS_TEST_CASE("reduce_from_tensor_model_parallel_region", {3}) {
  const Regions r(line());
  SUBCASE("input_") {
    check_region([&](const at::Tensor& t) { return reduce_from_region(t, r.mesh); }, r.row, r.sum, r.g, r.g);
  }
}

TESSERA_RANKS_TEST_CASE("reduce_scatter_to_sequence_parallel_region", {3}) {
  SUBCASE("input_") { check_reduce_scatter_to_sequence(Regions(line())); }
}

TESSERA_RANKS_TEST_CASE("reduce_scatter_to_sequence_parallel_region_from_moe", {4}) {
  SUBCASE("input_") { check_reduce_scatter_to_sequence(Regions(tensor_and_expert())); }
}

TESSERA_RANKS_TEST_CASE("scatter_to_sequence_parallel_region", {3}) {
  const Regions r(line());
  SUBCASE("input_") {
    check_region([&](const at::Tensor& t) { return scatter_to_sequence_region(t, r.mesh); }, r.x, r.of(r.x, 0),
                 r.of(r.g, 0), r.g);
  }
}

TESSERA_RANKS_TEST_CASE("scatter_to_tensor_model_parallel_region", {3}) {
  const Regions r(line());
  SUBCASE("input_") {
    check_region([&](const at::Tensor& t) { return scatter_to_region(t, r.mesh); }, r.x, r.of(r.x, 1), r.of(r.g, 1),
                 r.g);
  }
}
