// These kernels apply a style's contract (dtensor/core/contract.h) to an activation. They are registered above
// autograd, so that redistributing an activation is differentiable. InferenceMode excludes autograd's keys: for it they
// are registered at the DTensor key too, or as decompositions.

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/OpMathType.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/conv2d_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/group_norm_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/layer_norm_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/rms_norm_compositeimplicitautograd_dispatch.h>
#include <torch/library.h>

#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/gradient.h"
#include "tessera/dtensor/redistribute_result.h"
#include "tessera/dtensor/tangent.h"
#include "tessera/ops/kernels/added_bias.h"
#include "tessera/ops/kernels/bias_of_local.h"
#include "tessera/ops/kernels/contract_activation.h"
#include "tessera/ops/kernels/matmul.h"
#include "tessera/ops/kernels/styled_product.h"

namespace tessera {
namespace {

using torch::jit::Stack;

// Holds the base name of an operator that styles may name. The compiler checks that it is one.
struct ContractOp {
  consteval ContractOp(const char* given) : name(given) {  // NOLINT: written where the operator is called
    if (!reads_contracts(name)) throw "not in kContractOperators";
  }
  std::string_view name;
};

// Names an operator, and says where its activation and parameter are among its arguments.
struct Site {
  ContractOp op;
  std::size_t activation;
  std::size_t parameter;
};
constexpr Site kAddmm{"addmm", 1, 2};
constexpr Site kEmbedding{"embedding", 1, 0};

// Returns the contract of `parameter` for an operator, or nullptr.
ContractPtr contract_of(ContractOp op, const at::Tensor& parameter) {
  if (!detail::is_dtensor(parameter)) return nullptr;
  const ContractPtr& all = detail::meta(parameter).contract;
  const Contract* found = contract_for(all, op.name);
  return found == nullptr ? nullptr : ContractPtr(all, found);
}

const at::IValue& argument(const Stack& stack, std::size_t num_args, std::size_t i) {
  return stack[stack.size() - num_args + i];
}

at::Tensor bring_activation(const at::Tensor& x, const Contract& contract, const at::Tensor& parameter,
                            std::string_view op) {
  const detail::Activation given = detail::activation_of(x, contract, parameter, op);
  return detail::redistribute_shared(given.tensor, given.desired);
}

// Calls the operator's own autograd kernel, which LibTorch registers for all backends.
void call_libtorch(const c10::OperatorHandle& op, Stack& stack) {
  op.callBoxedForDispatchKey(c10::DispatchKey::Autograd, stack);
}

// Returns the key set that selects LibTorch's autograd kernel for all backends, which ours replaces for this backend.
c10::DispatchKeySet past_ours(c10::DispatchKeySet keys) {
  return (keys - c10::autograd_dispatch_keyset) | c10::DispatchKeySet(c10::DispatchKey::AutogradOther);
}

// Computes self + alpha * other where self is a plain result and other a bias with a contract. Any other call is passed
// to LibTorch's kernel.
template <class Op, class Result, class Self>
Result add_kernel(c10::DispatchKeySet keys, Self self, const at::Tensor& other, const at::Scalar& alpha) {
  const Contract* const contract = detail::bias_contract(self, other);
  if (contract == nullptr) return Op::redispatch(past_ours(keys), self, other, alpha);
  return Op::call(self, detail::bias_of_local(other, *contract, self), alpha);
}

// Does the same under InferenceMode.
bool add_in_inference(const c10::OperatorHandle& op, Stack& stack) {
  const std::size_t n = op.schema().arguments().size();
  if (n != 3 || !argument(stack, n, 0).isTensor() || !argument(stack, n, 1).isTensor()) return false;
  const at::Tensor self = argument(stack, n, 0).toTensor(), other = argument(stack, n, 1).toTensor();
  const Contract* const contract = detail::bias_contract(self, other);
  if (contract == nullptr) return false;
  stack[stack.size() - n + 1] = detail::bias_of_local(other, *contract, self);
  op.callBoxed(stack);
  return true;
}

// `y` is the result of an operator, which nobody else reads.
at::Tensor bring_result(at::Tensor y, const Contract& contract, std::string_view op) {
  if (contract.output) {
    const Spec& spec = spec_of(y);
    const Placements to = detail::as_contract_says(spec.placements, contract, *contract.output, spec.mesh.mesh(),
                                                   y.sizes(), op, "output");
    // Each term of a sum needs the whole gradient. It is gathered here once, not by every operator that uses it.
    if (to == spec.placements) {
      detail::add_layout_hook(y, contract.path);
    } else {
      y = detail::redistribute_result(y, to, {.grad_placements = without_partial(spec.placements)});
    }
  }
  if (!contract.use_local_output) return y;
  at::Tensor local = to_local(y);
  detail::note_local_result(local, y);
  return local;
}

// Runs the operator as the contract says, if there is one. `call` computes the result from an activation.
template <class Call>
at::Tensor contracted(ContractOp op, const at::Tensor& activation, const at::Tensor& parameter, const Call& call) {
  const ContractPtr contract = contract_of(op, parameter);
  if (contract == nullptr) return call(activation);
  const World::Scope scope(mesh_of(parameter).world(), op.name.data(), &contract->path);
  return bring_result(call(bring_activation(activation, *contract, parameter, op.name)), *contract, op.name);
}

using Continuation = void (*)(const c10::OperatorHandle& op, Stack& stack);

// Does the same for a call on a stack, for operators that end in a kernel of LibTorch's. `go_on` replaces the arguments
// by the result.
void with_contract(const c10::OperatorHandle& op, const Site& site, Stack& stack, Continuation go_on) {
  const std::size_t n = op.schema().arguments().size();
  const at::Tensor parameter = argument(stack, n, site.parameter).toTensor();
  const at::Tensor given = argument(stack, n, site.activation).toTensor();
  const std::size_t base = stack.size() - n;
  const at::Tensor result = contracted(site.op, given, parameter, [&](const at::Tensor& activation) {
    stack[base + site.activation] = activation;
    go_on(op, stack);
    return std::move(stack[base]).toTensor();
  });
  stack[base] = result;
}

// ---- each operator --------------------------------------------------------------------------------------------

using Optional = std::optional<at::Tensor>;

constexpr ContractOp kMatmul = "matmul";

// Holds a product, and says whether the bias has been added to it.
struct PlusBias {
  at::Tensor product;
  bool has_bias = false;
};

// Computes a b as b's contract says, and adds the bias, if there is one, where that can be done while the product is
// computed.
PlusBias contracted_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias) {
  const ContractPtr contract = contract_of(kMatmul, b);
  const bool may_add = bias.defined() && (contract == nullptr || !contract->use_local_output);
  if (contract == nullptr) {
    const bool adds =
        may_add && is_dtensor(a) && spec_of(a).mesh == mesh_of(b) && adds_within(placements_of(a), a, b, bias);
    return {.product = adds ? dense_bias(a, b, bias) : tessera::matmul(a, b), .has_bias = adds};
  }
  const World::Scope scope(mesh_of(b).world(), kMatmul.name.data(), &contract->path);
  const detail::Activation given = detail::activation_of(a, *contract, b, kMatmul.name);
  const bool adds = may_add && adds_within(given.desired, given.tensor, b, bias);
  const Optional added = adds ? Optional(bias) : std::nullopt;
  std::optional<at::Tensor> product =
      styled_product(given.tensor, b, added, {.desired = given.desired, .contract = contract, .uses = given.uses});
  if (!product) {
    const at::Tensor x = detail::redistribute_shared(given.tensor, given.desired);
    product = adds ? dense_bias(x, b, bias) : tessera::matmul(x, b);
  }
  return {.product = bring_result(*std::move(product), *contract, kMatmul.name), .has_bias = adds};
}

at::Tensor matmul_kernel(const at::Tensor& a, const at::Tensor& b) { return contracted_product(a, b, {}).product; }

// In forward mode LibTorch's formulas of norms compute with the zeros of a tangent that is not there alone, which makes
// plain tensors of them. So where one operand has a tangent each gets one.
bool any_tangent(const at::Tensor& x, const Optional& weight, const Optional& bias) {
  return detail::has_tangent(x) || detail::has_tangent(weight) || detail::has_tangent(bias);
}
Optional with_some_tangent(const Optional& t) { return t ? Optional(detail::with_some_tangent(*t)) : t; }

const at::Tensor& tensor_or_none(const Optional& t) {
  static const at::Tensor none;
  return t ? *t : none;
}

at::Tensor layer_norm(const at::Tensor& input, c10::SymIntArrayRef shape, const Optional& weight, const Optional& bias,
                      double eps, bool cudnn) {
  return contracted("layer_norm", input, tensor_or_none(weight), [&](const at::Tensor& x) {
    if (any_tangent(x, weight, bias)) [[unlikely]] {
      return at::compositeimplicitautograd::layer_norm_symint(
          detail::with_some_tangent(x), shape, with_some_tangent(weight), with_some_tangent(bias), eps, cudnn);
    }
    return at::compositeimplicitautograd::layer_norm_symint(x, shape, weight, bias, eps, cudnn);
  });
}

at::Tensor rms_norm(const at::Tensor& input, c10::SymIntArrayRef shape, const Optional& weight,
                    std::optional<double> eps) {
  return contracted("rms_norm", input, tensor_or_none(weight), [&](const at::Tensor& x) {
    if (any_tangent(x, weight, {})) [[unlikely]] {
      return at::compositeimplicitautograd::rms_norm_symint(detail::with_some_tangent(x), shape,
                                                            with_some_tangent(weight), eps);
    }
    return at::compositeimplicitautograd::rms_norm_symint(x, shape, weight, eps);
  });
}

// LibTorch's formula of a group norm's tangent writes into a view of groups, for which pieces may have to be moved.
// These operators, which make the same, have formulas that do not.
at::Tensor group_norm_of_parts(const at::Tensor& given, int64_t groups, const Optional& weight, const Optional& bias,
                               double eps) {
  const at::Tensor x = given.to(at::toOpMathType(given.scalar_type()));
  const int64_t size = x.numel() / std::max<int64_t>(x.size(0) * groups, 1);
  const at::Tensor parts = x.reshape({x.size(0), groups, size});
  const at::Tensor centered = parts.sub(parts.mean(2, /*keepdim=*/true));
  const at::Tensor variance = centered.square().mean(2, /*keepdim=*/true);
  at::Tensor out = centered.mul(variance.add(eps).rsqrt()).reshape(x.sizes());
  std::vector<int64_t> channels(static_cast<std::size_t>(x.dim()), 1);
  channels[1] = x.size(1);
  if (weight && weight->defined()) out = out.mul(weight->view(channels));
  if (bias && bias->defined()) out = out.add(bias->view(channels));
  return out.to(given.scalar_type());
}

at::Tensor group_norm(const at::Tensor& input, int64_t groups, const Optional& weight, const Optional& bias, double eps,
                      bool cudnn) {
  return contracted("group_norm", input, tensor_or_none(weight), [&](const at::Tensor& x) {
    const bool parts = any_tangent(x, weight, bias);
    // LibTorch refuses arguments that do not fit.
    if (parts && x.dim() >= 2 && groups > 0 && x.size(1) % groups == 0)
      return group_norm_of_parts(x, groups, weight, bias, eps);
    return at::compositeimplicitautograd::group_norm(x, groups, weight, bias, eps, cudnn);
  });
}

at::Tensor conv2d(const at::Tensor& input, const at::Tensor& weight, const Optional& bias, c10::SymIntArrayRef stride,
                  c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, c10::SymInt groups) {
  return contracted("conv2d", input, weight, [&](const at::Tensor& x) {
    return at::compositeimplicitautograd::conv2d_symint(x, weight, bias, stride, padding, dilation, groups);
  });
}

// Does the same for a padding that is given by its name, "same" or "valid".
at::Tensor conv2d_padding(const at::Tensor& input, const at::Tensor& weight, const Optional& bias,
                          c10::SymIntArrayRef stride, c10::string_view padding, c10::SymIntArrayRef dilation,
                          c10::SymInt groups) {
  return contracted("conv2d", input, weight, [&](const at::Tensor& x) {
    return at::compositeimplicitautograd::conv2d_symint(x, weight, bias, stride, padding, dilation, groups);
  });
}

// Runs addmm or embedding, which end in LibTorch's autograd kernels, as the parameter's contract says.
template <const Site& At>
void boxed_contract_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  const std::size_t n = op.schema().arguments().size();
  if (contract_of(At.op, argument(*stack, n, At.parameter).toTensor()) == nullptr) return call_libtorch(op, *stack);
  with_contract(op, At, *stack, call_libtorch);
}

// LibTorch's addmm saves the activation after it was redistributed. With gather_input_again matmul's kernel computes
// the product instead, and the bias is added.
void addmm_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const std::size_t n = op.schema().arguments().size();
  const at::Tensor parameter = argument(*stack, n, kAddmm.parameter).toTensor();
  const ContractPtr contract = contract_of(kAddmm.op, parameter);
  const auto is_one = [&](std::size_t i) { return argument(*stack, n, i).toScalar().equal(1); };
  if (contract == nullptr || !contract->gather_input_again || !is_one(3) || !is_one(4)) {
    return boxed_contract_kernel<kAddmm>(op, keys, stack);
  }
  const at::Tensor bias = argument(*stack, n, 0).toTensor();
  const at::Tensor product = matmul_kernel(argument(*stack, n, kAddmm.activation).toTensor(), parameter);
  torch::jit::drop(*stack, n);
  stack->emplace_back(product.add(bias));
}

// Computes linear(x, w, b): the product, which has the contract, and adds the bias once.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const bool has_bias = bias && bias->defined();
  if (x.dim() == 2 && has_bias) return at::addmm(*bias, x, weight.t());
  if (!has_bias) return x.matmul(weight.t());
  const PlusBias made =
      is_dtensor(weight) ? contracted_product(x, weight.t(), *bias) : PlusBias{.product = x.matmul(weight.t())};
  if (made.has_bias) return made.product;
  return adds_in_place(made.product, *bias) ? made.product.add_(*bias) : made.product.add(*bias);
}

// ---- InferenceMode --------------------------------------------------------------------------------------------

// Operators with an OpDispatcher at the DTensor key ask this function first.
template <const Site& At>
bool in_inference(const c10::OperatorHandle& op, Stack& stack) {
  thread_local bool inside = false;  // the continuation calls this function again
  if (inside) return false;
  const std::size_t n = op.schema().arguments().size();
  if (contract_of(At.op, argument(stack, n, At.parameter).toTensor()) == nullptr) return false;
  with_contract(op, At, stack, [](const c10::OperatorHandle& o, Stack& s) {
    const struct Inside {
      Inside() { inside = true; }
      ~Inside() { inside = false; }
    } guard;
    o.callBoxed(s);
  });
  return true;
}

[[maybe_unused]] const bool kRegistered =
    register_decomposition("addmm", in_inference<kAddmm>, DecomposedCalls::kInInference) &&
    register_decomposition("embedding", in_inference<kEmbedding>, DecomposedCalls::kInInference) &&
    register_decomposition("add", add_in_inference, DecomposedCalls::kBesidePlainInInference);

// Registers the operators that LibTorch composes of others; it is called for both keys.
void register_composites(torch::Library& m) {
  m.impl("matmul", matmul_kernel);
  m.impl("linear", linear);
  m.impl("layer_norm", layer_norm);
  m.impl("rms_norm", rms_norm);
  m.impl("group_norm", group_norm);
  m.impl("conv2d", conv2d);
  m.impl("conv2d.padding", conv2d_padding);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, m) {
  register_composites(m);
  m.impl("add.Tensor", add_kernel<at::_ops::add_Tensor, at::Tensor, const at::Tensor&>);
  m.impl("add_.Tensor", add_kernel<at::_ops::add__Tensor, at::Tensor&, at::Tensor&>);
  m.impl("addmm", torch::CppFunction::makeFromBoxedFunction<&addmm_kernel>());
  m.impl("embedding", torch::CppFunction::makeFromBoxedFunction<&boxed_contract_kernel<kEmbedding>>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse3, m) { register_composites(m); }

}  // namespace
}  // namespace tessera
