#include "tessera/tests/ops/rules/variants.h"

#include <functional>

#include <ATen/ATen.h>

namespace tessera::testing {
namespace {

// Returns the sample with each tensor changed, and with another number in the place of its numbers.
Sample changed(const Sample& sample, const std::function<at::Tensor(const at::Tensor&)>& change, double number) {
  const WholeCall whole(sample);
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& t : whole.tensors()) tensors.push_back(t.defined() ? change(t) : t);
  Sample out = sample;
  out.args = whole.args_with(tensors);
  for (std::size_t i = 0; i < out.args.size(); ++i) {
    if (whole.schema().arguments()[i].type()->kind() != c10::TypeKind::NumberType) continue;
    if (out.args[i].isDouble()) out.args[i] = number;
    if (out.args[i].isInt()) out.args[i] = -out.args[i].toInt();
  }
  return out;
}

// Returns numbers of any sign, `size` times as large; bools are true with probability `share`.
at::Tensor of_any_sign(const at::Tensor& t, double size, double share) {
  if (t.scalar_type() == at::kBool) return at::rand(t.sizes()) < share;
  if (!at::isFloatingType(t.scalar_type())) return t;
  return t * (at::rand(t.sizes()) < 0.5).to(t.scalar_type()).mul(2).sub(1) * size;
}

// Returns small integers, of which many are zero or equal.
at::Tensor whole_numbers(const at::Tensor& t) {
  return at::isFloatingType(t.scalar_type()) ? at::randn(t.sizes(), t.options()).mul(1.5).round() : t;
}

}  // namespace

std::vector<Sample> variants(const Sample& sample) {
  std::vector<Sample> out = {sample,
                             changed(
                                 sample, [](const at::Tensor& t) { return of_any_sign(t, 1, 0.03); }, -0.5),
                             changed(
                                 sample, [](const at::Tensor& t) { return of_any_sign(t, 6, 0.97); }, -2.5)};
  for (int i = 0; i < 3; ++i) out.push_back(changed(sample, whole_numbers, 1));
  return out;
}

}  // namespace tessera::testing
