// Tests autocast on DTensors: the dtypes are those of plain tensors, and so are the values up to the order of sums.

#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/dtensor/relative.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/placement/short_names.h"
#include "tessera/tests/pytorch_cases/beside_plain.h"
#include "tessera/tests/styles/blocks.h"

namespace tessera::testing {
namespace {

// bfloat16 has 8 bits: a sum of a few terms in another order rounds each to a part in 512 of the largest.
constexpr double kRounding = 0.02;

// Sets autocast for this thread.
class Autocast {
 public:
  explicit Autocast(at::ScalarType dtype = at::kBFloat16, at::DeviceType type = device().type(), bool enabled = true)
      : device_(type),
        enabled_(at::autocast::is_autocast_enabled(type)),
        dtype_(at::autocast::get_autocast_dtype(type)) {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_enabled(type, enabled);
    at::autocast::set_autocast_dtype(type, dtype);
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device_, enabled_);
    at::autocast::set_autocast_dtype(device_, dtype_);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  at::DeviceType device_;
  bool enabled_;
  at::ScalarType dtype_;
};

at::Tensor numbers_of(std::vector<int64_t> shape, int64_t seed) { return sample(shape, seed, at::kFloat); }

// Returns a leaf of that value. The terms of a pending sum are no larger than the value, since each is rounded by
// itself.
at::Tensor leaf_of(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements) {
  if (placements != Placements{P}) return leaf(whole, mesh, placements);
  const int64_t n = mesh.size(), share = mesh.local_rank(0) + 1;
  const at::Tensor term = whole * (2.0 * static_cast<double>(share) / static_cast<double>(n * (n + 1)));
  return from_local(term, mesh, placements).requires_grad_(true);
}

// Returns the weight of each element in the loss. No two are alike, so that a softmax has a gradient. Their mean is not
// 0: a gradient in which terms nearly cancel would be as small as the rounding of its terms.
at::Tensor weights_of(const at::Tensor& result) { return numbers_of(result.sizes().vec(), 11) + 0.25; }

// Checks the dtype, and the values and the gradients relative to their largest, against the plain call.
void check(const DeviceMesh& mesh, const std::vector<Operand>& operands, const Operator& f, at::ScalarType dtype) {
  Tensors plain, mine;
  for (const Operand& operand : operands) {
    plain.push_back(leaf(operand.whole));
    mine.push_back(leaf_of(operand.whole, mesh, operand.placements));
  }
  at::Tensor want, got;
  {
    const Autocast autocast(dtype);
    want = f(plain);
    got = f(mine);
  }
  CHECK((got.scalar_type() == want.scalar_type()));
  // In double, since a division by the largest in the narrow dtype would round once more.
  CHECK(close_to_scale(full_tensor(got.detach()).to(at::kDouble), want.detach().to(at::kDouble), kRounding));
  const at::Tensor weights = weights_of(want);
  const Placements whole(static_cast<std::size_t>(mesh.ndim()), R);
  (want.to(at::kFloat) * weights).sum().backward();
  (got.to(at::kFloat) * spread(weights, mesh, whole)).sum().backward();
  for (std::size_t i = 0; i < plain.size(); ++i) {
    CAPTURE(i);
    CHECK((mine[i].grad().scalar_type() == at::kFloat));
    CHECK(close_to_scale(full_tensor(mine[i].grad()), plain[i].grad(), 2 * kRounding));
  }
}

struct Row {
  const char* name;
  Tensors operands;
  Operator f;
};

std::vector<Row> table() {
  const at::Tensor x = numbers_of({6, 5}, 0), w = numbers_of({4, 5}, 1), bias = numbers_of({4}, 2);
  const at::Tensor batch = numbers_of({4, 3, 5}, 3), other = numbers_of({4, 5, 2}, 4),
                   heads = numbers_of({4, 2, 5, 6}, 5);
  // The image's mean is not 0, for the same reason as that of the weights.
  const at::Tensor image = numbers_of({4, 2, 6, 6}, 6) + 0.5, filter = numbers_of({3, 2, 3, 3}, 7),
                   rows = numbers_of({5}, 8);
  return {
      {"linear", {x, w, bias}, [](const Tensors& t) { return at::linear(t[0], t[1], t[2]); }},
      {"linear of three dimensions", {batch, w, bias}, [](const Tensors& t) { return at::linear(t[0], t[1], t[2]); }},
      {"matmul", {x, w}, [](const Tensors& t) { return at::matmul(t[0], t[1].t()); }},
      {"addmm", {bias, x, w}, [](const Tensors& t) { return at::addmm(t[0], t[1], t[2].t()); }},
      {"bmm", {batch, other}, [](const Tensors& t) { return at::bmm(t[0], t[1]); }},
      {"conv2d", {image, filter}, [](const Tensors& t) { return at::conv2d(t[0], t[1]); }},
      {"attention",
       {heads, heads},
       [](const Tensors& t) { return at::scaled_dot_product_attention(t[0], t[1], t[1]); }},
      {"softmax of a product", {x, w}, [](const Tensors& t) { return at::softmax(at::matmul(t[0], t[1].t()), 1); }},
      {"layer_norm", {x, rows, rows}, [](const Tensors& t) { return at::layer_norm(t[0], {5}, t[1], t[2]); }},
      {"layer_norm of a product",
       {x, w, bias, bias},
       [](const Tensors& t) { return at::layer_norm(at::linear(t[0], t[1]), {4}, t[2], t[3]); }},
      {"gelu of a product", {x, w}, [](const Tensors& t) { return at::gelu(at::linear(t[0], t[1])); }},
      {"a sum of both dtypes", {x, w}, [](const Tensors& t) { return at::linear(t[0], t[1]) + t[0].sum(1, true); }},
      {"mse_loss, which stays float",
       {x, x * 0.5, w},
       [](const Tensors& t) { return at::mse_loss(at::linear(t[0], t[2]), at::linear(t[1], t[2])); }},
      {"prod, which stays float", {x, w}, [](const Tensors& t) { return at::linear(t[0], t[1]).prod(1); }},
      {"cat of both dtypes",
       {x, w},
       [](const Tensors& t) {
         return at::cat({at::linear(t[0], t[1]), t[0]}, 1);
       }},
  };
}

}  // namespace

TEST_CASE("autocast: dtypes, values and gradients of everyday operators, on each layout") {
  on_lines([](const DeviceMesh& mesh) {
    for (const Row& row : table()) {
      CAPTURE(std::string(row.name));
      for (const Placement& first : {R, S0, S1, P}) {
        for (const Placement& others : {R, S0}) {
          CAPTURE(to_string(first));
          CAPTURE(to_string(others));
          std::vector<Operand> operands;
          for (const at::Tensor& t : row.operands)
            operands.push_back({t, {operands.empty() && t.dim() > 1 ? first : others}});
          check(mesh, operands, row.f, at::kBFloat16);
        }
      }
    }
  });
}

TEST_CASE("autocast on 2 x 2, and into half") {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const Tensors t = table()[0].operands;
    for (const Placements& x : {Placements{S0, R}, {S0, S1}, {R, S1}}) {
      for (const Placements& w : {Placements{R, S0}, {R, S1}, {S0, S0}}) {
        for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
          check(mesh, {{t[0], x}, {t[1], w}, {t[2], {R, R}}}, table()[0].f, dtype);
        }
      }
    }
  });
}

TEST_CASE("autocast leaves forms with out= alone") {
  on_lines([](const DeviceMesh& mesh) {
    const at::Tensor x = numbers_of({6, 5}, 0), w = numbers_of({5, 4}, 1), want = at::empty({6, 4});
    at::Tensor got = spread(want, mesh, {S0}), plain = want.clone();
    const at::NoGradGuard no_grad;
    const Autocast autocast(at::kBFloat16);
    at::matmul_out(plain, x, w);
    at::matmul_out(got, spread(x, mesh, {S0}), spread(w, mesh, {R}));
    const at::Tensor exact = x.to(at::kDouble).mm(w.to(at::kDouble));
    CHECK(close_to_scale(plain.to(at::kDouble), exact, 1e-6));
    CHECK(close_to_scale(full_tensor(got).to(at::kDouble), exact, 1e-6));
  });
}

TEST_CASE("a product under autocast is that of the tensors cast beforehand") {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const at::Tensor x = numbers_of({6, 5}, 0), w = numbers_of({4, 5}, 1);
    for (const Placement& placement : {S0, R}) {  // no sum is split over ranks
      const at::Tensor d = spread(x, mesh, {placement}), weight = spread(w, mesh, {R});
      const at::Tensor cast = at::linear(d.to(at::kBFloat16), weight.to(at::kBFloat16));
      const Autocast autocast;
      const at::Tensor y = at::linear(d, weight);
      CHECK(same(full_tensor(y), full_tensor(cast)));
      CHECK((full_tensor(y).scalar_type() == at::kBFloat16));
    }
  });
}

TEST_CASE("autocast switched off inside, without gradients, and under InferenceMode") {
  on_lines([](const DeviceMesh& mesh) {
    const at::Tensor x = numbers_of({6, 5}, 0), w = numbers_of({4, 5}, 1), whole = at::linear(x, w);
    const at::Tensor d = spread(x, mesh, {S0}), weight = leaf(w, mesh, {S1});
    const Autocast low_precision;
    const at::Tensor low = at::linear(x, w);
    {
      const Autocast off(at::kBFloat16, device().type(), false);
      const at::Tensor y = at::linear(d, weight);
      CHECK((y.scalar_type() == at::kFloat));
      CHECK(close(full_tensor(y.detach()), whole, 1e-6));
    }
    {
      const at::NoGradGuard no_grad;
      const at::Tensor y = at::linear(d, weight);
      CHECK((y.scalar_type() == at::kBFloat16));
      CHECK_FALSE(y.requires_grad());
      CHECK(close(full_tensor(y), low, kRounding));
    }
    {
      const c10::InferenceMode inference;
      const at::Tensor y = at::linear(d, weight);
      CHECK((y.scalar_type() == at::kBFloat16));
      CHECK(y.is_inference());
      CHECK(close(full_tensor(y), low, kRounding));
    }
  });
}

namespace {

// Counts how often this thread called `_to_copy` on a DTensor or a plain tensor while it was alive.
class Casts {
 public:
  Casts() {
    count = 0;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction& call) {
      if (std::string(call.name()) == "aten::_to_copy") ++count;
      return std::unique_ptr<at::ObserverContext>();
    }));
  }
  ~Casts() { at::removeCallback(handle_); }
  Casts(const Casts&) = delete;
  Casts& operator=(const Casts&) = delete;

  static thread_local int64_t count;

 private:
  at::CallbackHandle handle_;
};
thread_local int64_t Casts::count = 0;

}  // namespace

TEST_CASE("autocast casts a weight once, until its cache is cleared") {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = numbers_of({6, 5}, 0), w = numbers_of({4, 5}, 1);
    const at::Tensor d = spread(x.to(at::kBFloat16), mesh, {S0}), weight = leaf(w, mesh, {R});
    const auto casts_of_a_call = [&] {
      const Casts casts;
      at::linear(d, weight);
      return Casts::count;
    };
    // The cache belongs to the process. It is off where ranks are threads, since the other rank could clear it
    // meanwhile.
    CHECK_FALSE(at::autocast::is_autocast_cache_enabled());
    at::autocast::set_autocast_cache_enabled(true);
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    const Autocast autocast;
    CHECK(casts_of_a_call() > 0);
    CHECK(casts_of_a_call() == 0);
    at::autocast::clear_cache();
    CHECK(casts_of_a_call() > 0);
  });
}

TEST_CASE("autocast: the gradient of a weight that is cast once and used twice") {
  on_lines([](const DeviceMesh& mesh) {
    check(
        mesh, {{numbers_of({6, 5}, 0), {S0}}, {numbers_of({5, 5}, 1), {R}}},
        [](const Tensors& t) { return at::linear(at::linear(t[0], t[1]).tanh(), t[1]); }, at::kBFloat16);
  });
}

TEST_CASE("autocast of another device changes nothing, and a DTensor uses only its own device's") {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = numbers_of({6, 5}, 0), w = numbers_of({4, 5}, 1);
    const at::Tensor d = spread(x, mesh, {S0}), weight = spread(w, mesh, {S1});
    CHECK(d.key_set().has(c10::DispatchKey::AutocastCPU) == device().is_cpu());
    CHECK(d.key_set().has(c10::DispatchKey::AutocastCUDA) == device().is_cuda());
    const Autocast another(at::kHalf, device().is_cuda() ? at::kCPU : at::kCUDA);
    CHECK((at::linear(x, w).scalar_type() == at::kFloat));
    const at::Tensor y = at::linear(d, weight);
    CHECK((y.scalar_type() == at::kFloat));
    CHECK(close(full_tensor(y), at::linear(x, w), 1e-6));
  });
}

TEST_CASE("a transformer block under styles and autocast: dtypes, values, gradients") {
  on_lines([](const DeviceMesh& mesh) {
    const ParallelPlan replicated = {{"attn.w[qkv]", ColwiseParallel()},
                                     {"attn.wo", RowwiseParallel()},
                                     {"mlp.up", ColwiseParallel()},
                                     {"mlp.down", RowwiseParallel()}};
    const ParallelPlan sequence = {{"norm?", SequenceParallel()},
                                   {"attn.w[qkv]", ColwiseParallel({.input_layouts = Shard(1)})},
                                   {"attn.wo", RowwiseParallel({.output_layouts = Shard(1)})},
                                   {"mlp.up", ColwiseParallel({.input_layouts = Shard(1)})},
                                   {"mlp.down", RowwiseParallel({.output_layouts = Shard(1)})}};
    static std::mutex mutex;  // the numbers are drawn from the process's generator
    for (const bool cut : {false, true}) {
      CAPTURE(cut);
      Block want{nullptr}, got{nullptr};
      at::Tensor x;
      {
        const std::lock_guard lock(mutex);
        want = Block(12, 12, 24);
        got = Block(12, 12, 24);
        fill(*want, at::kFloat);
        fill(*got, at::kFloat);
        x = numbers({2, 5, 12}, 3, at::kFloat);
      }
      auto tp = parallelize_module(got, mesh, cut ? sequence : replicated);
      const at::Tensor mine = spread(x, mesh, {cut ? S1 : R});
      at::Tensor y, expected;
      {
        const Autocast autocast;
        expected = want->forward(x);
        y = tp(mine);
      }
      CHECK((y.scalar_type() == expected.scalar_type()));
      CHECK(difference(y, expected) <= 2 * kRounding);
      expected.to(at::kFloat).square().mean().backward();
      y.to(at::kFloat).square().mean().backward();
      check_parameters(*got, *want, /*gradients=*/true, 5 * kRounding, {"wk.bias"});
    }
  });
}

}  // namespace tessera::testing
