#include "tessera/dtensor/init.h"

#include <algorithm>
#include <array>
#include <stdexcept>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/deferred/deferred.h"

namespace tessera {
namespace {

void check(const char* who, const at::Tensor& t, int64_t least, int64_t most) {
  constexpr std::array kDrawn = {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};
  const bool known = detail::is_dtensor(t) || detail::is_deferred(t);
  const bool is_drawn = t.defined() && std::ranges::find(kDrawn, t.scalar_type()) != kDrawn.end();
  if (known && is_drawn && t.dim() >= least && t.dim() <= most) return;
  throw std::invalid_argument(fmt::format(
      "{}: takes a DTensor of Half, BFloat16, Float or Double with {} to {} dimensions, not {}; a plain tensor goes to "
      "torch::nn::init::{}",
      who, least, most,
      t.defined() ? fmt::format("{} {} [{}]", known ? "a DTensor" : "a plain tensor", c10::toString(t.scalar_type()),
                                fmt::join(t.sizes(), ", "))
                  : "an undefined tensor",
      who));
}

}  // namespace

at::Tensor orthogonal_(at::Tensor t, double gain) {
  check("orthogonal_", t, 2, 64);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tessera::orthogonal_", "")
                             .typed<at::Tensor&(at::Tensor&, double)>();
  const at::NoGradGuard no_grad;
  return op.call(t, gain);
}

at::Tensor sparse_(at::Tensor t, double sparsity, double deviation) {
  check("sparse_", t, 2, 2);
  if (!(sparsity >= 0 && sparsity <= 1) || !(deviation >= 0)) {
    throw std::invalid_argument(
        fmt::format("sparse_: sparsity {} and deviation {}; give a sparsity from 0 to 1 and a deviation of 0 or more",
                    sparsity, deviation));
  }
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tessera::sparse_", "")
                             .typed<at::Tensor&(at::Tensor&, double, double)>();
  const at::NoGradGuard no_grad;
  return op.call(t, sparsity, deviation);
}

at::Tensor dirac_(at::Tensor t) {
  check("dirac_", t, 3, 5);
  if (detail::is_dtensor(t) && detail::meta(t).spec->partial) {
    throw std::invalid_argument(fmt::format(
        "dirac_: {} has a pending reduction, whose terms could be written in many ways; redistribute it before",
        to_string(*detail::meta(t).spec)));
  }
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("tessera::dirac_", "").typed<at::Tensor&(at::Tensor&)>();
  const at::NoGradGuard no_grad;
  return op.call(t);
}

}  // namespace tessera
