#include <ATen/ATen.h>

#include "tessera/tests/modules/row.h"

namespace tessera::testing {

at::Tensor waves(at::IntArrayRef sizes, double seed) {
  const int64_t n = c10::multiply_integers(sizes);
  return (at::arange(n, at::kDouble) * 1.7 + seed).sin().view(sizes);
}

at::Tensor shares(at::IntArrayRef sizes, double seed) { return waves(sizes, seed) * 0.45 + 0.5; }

at::Tensor indices(at::IntArrayRef sizes, int64_t below) {
  const int64_t n = c10::multiply_integers(sizes);
  return (at::arange(n, at::kLong) * 7 % below).view(sizes);
}

at::Tensor signs(at::IntArrayRef sizes) { return at::where(waves(sizes, 3) > 0, 1.0, -1.0).to(at::kDouble); }

Input plain(at::Tensor value) { return {std::move(value), Input::As::kPlain}; }
Input whole_input(at::Tensor value) { return {std::move(value), Input::As::kWhole}; }

Input without_grad(Input input) {
  input.grad = false;
  return input;
}

}  // namespace tessera::testing
