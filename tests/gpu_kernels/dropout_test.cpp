#include "tessera/gpu_kernels/dropout.h"

#include <limits>
#include <optional>
#include <string>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/random/draws.h"
#include "tessera/tests/gpu_kernels/pieces.h"

using namespace tessera;
using namespace tessera::testing;
using tessera::detail::Dropped;

namespace {

// Returns numbers of both signs, among them zeros, an infinity and the greatest ones.
at::Tensor numbers(const Held& held, at::ScalarType dtype) {
  const at::Tensor shape = empty_piece(held, at::kDouble);
  const at::Tensor t = at::arange(shape.numel(), at::kDouble).sub_(3).mul_(0.3).to(dtype).view(shape.sizes());
  const at::Tensor flat = t.view({-1});
  const auto set = [&](int64_t i, double value) {
    if (i < flat.numel()) flat[i].fill_(value);
  };
  set(5, -0.0);
  set(8, dtype == at::kHalf ? 65504 : 3e38);
  set(9, -std::numeric_limits<double>::infinity());
  return t;
}

// Says whether two tensors have the same bits; any two numbers that are none are alike.
bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && at::where(a.isnan(), b.isnan(), a.eq(b)).all().item<bool>() &&
         a.signbit().logical_or(a.isnan()).equal(b.signbit().logical_or(b.isnan()));
}

// Checks that threads which each do their share give `want`, what the host makes.
template <class T>
void check_threads(const at::Tensor& input, const Dropped& want, const Spec& spec, double kept) {
  for (const bool aligned : {true, false}) {
    for (const int64_t workers : {1, 7}) {
      const Dropped got{.result = at::zeros_like(input), .mask = at::zeros_like(want.mask)};
      const std::optional<gpu::Dropout> request = tessera::detail::dropout_request(input, got, spec, kKey, kept);
      REQUIRE(request);
      const gpu::Bernoulli<bool> event(request->kept);
      const bool stretch = gpu::begins_at_block(request->piece, gpu::Bernoulli<bool>::kPerBlock);
      for (int64_t worker = 0; worker < workers; ++worker) {
        gpu::drop<T>(*request, event, request->draw, stretch && worker % 2 == 0, aligned, worker, workers);
      }
      CHECK(got.mask.equal(want.mask));
      CHECK(same_bits(got.result, want.result));
    }
  }
}

}  // namespace

TEST_CASE("the threads of a dropout make together what a draw and a product make") {
  for (const Held& held : pieces()) {
    CAPTURE(std::string(held.name));
    const Spec spec = spec_of(held);
    const auto check = [&]<class T>(at::ScalarType dtype, T) {
      CAPTURE(std::string(c10::toString(dtype)));
      for (const double kept : {0.9, 0.3, 1.0, 0.0}) {
        CAPTURE(kept);
        const at::Tensor input = numbers(held, dtype);
        check_threads<T>(input, tessera::detail::draw_dropout(input, spec, kKey, kept), spec, kept);
      }
    };
    check(at::kFloat, float{});
    check(at::kDouble, double{});
    check(at::kHalf, at::Half{});
    check(at::kBFloat16, at::BFloat16{});
  }
}

TEST_CASE("a dropout keeps what the draw of its mask keeps, and divides it") {
  const Held held = {"rows", {40, 25}, {one_interval(10, 30), one_interval(0, 25)}};
  const Spec spec = spec_of(held);
  const at::Tensor mask = empty_piece(held, at::kBool);
  tessera::detail::draw_bernoulli(mask, spec, kKey, 0.75);
  const at::Tensor input = at::full(mask.sizes(), -3.0, at::kDouble);
  const Dropped out = tessera::detail::draw_dropout(input, spec, kKey, 0.75);
  CHECK(out.mask.equal(mask));
  CHECK(out.result.equal(at::where(mask, -4.0, -0.0)));
  CHECK(mask.any().item<bool>());
  CHECK_FALSE(mask.all().item<bool>());
}

TEST_CASE("a dropout in 16 bits divides by the probability itself, not by one rounded to 16 bits") {
  const Held held = {"all", {64}, {one_interval(0, 64)}};
  const Dropped out = tessera::detail::draw_dropout(at::full({64}, 2.1, at::kHalf), spec_of(held), kKey, 0.9);
  const double want =
      static_cast<at::Half>(static_cast<float>(static_cast<at::Half>(2.1F)) * static_cast<float>(1 / 0.9));
  CHECK(out.result.max().item<double>() == want);
}

TEST_CASE("a dropout of another dtype, or of another order in memory, is not one for the kernel") {
  const Held held = {"all", {6, 4}, {one_interval(0, 6), one_interval(0, 4)}};
  const Spec spec = spec_of(held);
  const Dropped to{.result = empty_piece(held, at::kFloat), .mask = empty_piece(held, at::kBool)};
  const auto takes = [&](const at::Tensor& input) {
    return tessera::detail::dropout_request(input, to, spec, kKey, 0.5).has_value();
  };
  CHECK(takes(at::ones({6, 4})));
  CHECK_FALSE(takes(at::ones({6, 4}, at::kComplexFloat)));
  CHECK_FALSE(takes(at::ones({4, 6}).t()));
  CHECK_FALSE(takes(at::_efficientzerotensor({6, 4})));
  // They are made by a draw and a product.
  const Dropped whole = tessera::detail::draw_dropout(at::ones({6, 4}), spec, kKey, 0.5);
  const at::Tensor turned = at::ones({4, 6}).t();
  CHECK(tessera::detail::draw_dropout(turned, spec, kKey, 0.5).result.equal(whole.result));
  CHECK(tessera::detail::draw_dropout(at::ones({6, 4}, at::kComplexFloat), spec, kKey, 0.5).mask.equal(whole.mask));
}
