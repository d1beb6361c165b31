#include "tessera/tests/operators/more_samples.h"

#include <limits>

#include <ATen/ATen.h>

namespace tessera::testing {
namespace {

at::Tensor x(at::IntArrayRef sizes) { return at::rand(sizes, at::kDouble) + 0.1; }
c10::List<at::Tensor> two() { return c10::List<at::Tensor>({x({5, 3}), x({4})}); }
// A GPU's kernels read counts of steps as float32.
c10::List<at::Tensor> steps() { return c10::List<at::Tensor>({at::ones({}, at::kFloat), at::ones({}, at::kFloat)}); }
c10::List<at::Tensor> nothing() { return c10::List<at::Tensor>(); }

// Returns arguments of _fused_adam and _fused_adamw, with a learning rate that is a number or a tensor.
torch::jit::Stack adam(const at::IValue& rate, bool amsgrad) {
  return {two(), two(), two(), two(), amsgrad ? two() : nothing(), steps(), rate, 0.9, 0.99, 0.1, 1e-8, amsgrad, false};
}

torch::jit::Stack adagrad() { return {two(), two(), two(), steps(), 0.1, 0.01, 0.1, 1e-8, false}; }

// Adds arguments without gradient scales; the first list's tensors are written to another list.
torch::jit::Stack with_out(torch::jit::Stack args) {
  args.insert(args.end(), {at::IValue(), at::IValue(), at::IValue(two())});
  return args;
}

// Adds a gradient scale, and whether a gradient is not finite.
torch::jit::Stack scaled(torch::jit::Stack args, float found_inf) {
  args.insert(args.end(), {at::full({1}, 4.0, at::kFloat), at::full({1}, found_inf, at::kFloat)});
  return args;
}

std::vector<Sample> optimizer_samples() {
  std::vector<Sample> out;
  for (const char* name : {"aten::_fused_adam", "aten::_fused_adam_", "aten::_fused_adamw", "aten::_fused_adamw_"}) {
    out.push_back({.op = name, .args = adam(0.1, false)});
    out.push_back({.op = name, .args = adam(0.1, true)});
    out.push_back({.op = name, .args = scaled(adam(0.1, false), 0)});
    out.push_back({.op = name, .args = scaled(adam(0.1, false), 1)});
    out.push_back({.op = std::string(name) + ".tensor_lr", .args = adam(at::scalar_tensor(0.1, at::kDouble), false)});
    if (std::string(name).ends_with("_")) continue;
    out.push_back({.op = std::string(name) + ".out", .args = with_out(adam(0.1, false))});
    out.push_back({.op = std::string(name) + ".tensor_lr_out",
                   .args = with_out(adam(at::scalar_tensor(0.1, at::kDouble), false))});
  }
  for (const char* name : {"aten::_fused_adagrad", "aten::_fused_adagrad_"}) {
    out.push_back({.op = name, .args = adagrad()});
    out.push_back({.op = name, .args = scaled(adagrad(), 0)});
    out.push_back({.op = name, .args = scaled(adagrad(), 1)});
    if (!std::string(name).ends_with("_")) {
      out.push_back({.op = std::string(name) + ".out", .args = with_out(adagrad())});
    }
  }
  for (const char* name :
       {"aten::_foreach_addcdiv", "aten::_foreach_addcdiv_", "aten::_foreach_addcmul", "aten::_foreach_addcmul_"}) {
    out.push_back(
        {.op = std::string(name) + ".Tensor", .args = {two(), two(), two(), at::tensor({0.5, 2.0}, at::kDouble)}});
  }
  for (const bool finite : {true, false}) {
    const at::Tensor last = at::rand({4});
    if (!finite) last[3] = std::numeric_limits<float>::infinity();
    out.push_back({.op = "aten::_amp_foreach_non_finite_check_and_unscale_",
                   .args = {c10::List<at::Tensor>({at::rand({5, 3}), last}), at::zeros({1}), at::full({1}, 0.5)}});
  }
  return out;
}

std::vector<Sample> gradient_samples() {
  return {
      {.op = "aten::gelu_backward", .args = {x({5, 3}), x({5, 3})}},
      {.op = "aten::sigmoid_backward", .args = {x({5, 3}), x({5, 3})}},
      {.op = "aten::silu_backward", .args = {x({5, 3}), x({5, 3})}},
      {.op = "aten::tanh_backward", .args = {x({5, 3}), x({5, 3})}},
      {.op = "aten::threshold_backward", .args = {x({5, 3}), x({5, 3}), 0.5}},
      {.op = "aten::hardtanh_backward", .args = {x({5, 3}), x({5, 3}), 0.2, 0.8}},
      {.op = "aten::leaky_relu_backward", .args = {x({5, 3}), x({5, 3}) - 0.5, 0.1, false}},
      {.op = "aten::softplus_backward", .args = {x({5, 3}), x({5, 3}), 1, 20}},
      {.op = "aten::mish_backward", .args = {x({5, 3}), x({5, 3})}},
      {.op = "aten::hardswish_backward", .args = {x({5, 3}), x({5, 3})}},
      {.op = "aten::hardsigmoid_backward", .args = {x({5, 3}), x({5, 3})}},
      {.op = "aten::logit_backward", .args = {x({5, 3}), x({5, 3}) * 0.5}},
  };
}

}  // namespace

std::vector<Sample> more_samples() {
  std::vector<Sample> out = {
      {.op = "aten::clamp", .args = {x({5, 3}), 0.3, 0.7}},
      {.op = "aten::clip", .args = {x({5, 3}), 0.3, 0.7}},
      {.op = "aten::randint_like.low_dtype", .args = {x({5, 3}), 1, 7}, .random = true},
  };
  for (const auto& list : {optimizer_samples(), gradient_samples()}) out.insert(out.end(), list.begin(), list.end());
  return out;
}

}  // namespace tessera::testing
