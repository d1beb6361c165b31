// These kernels apply a style's contract (dtensor/core/contract.h) to an activation. They are registered above
// autograd, so that redistributing an activation is differentiable. InferenceMode excludes autograd's keys: for it they
// are registered at the DTensor key too, or as decompositions.

#include <algorithm>
#include <optional>
#include <stdexcept>
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
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/library.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/gradient.h"
#include "tessera/dtensor/redistribute_result.h"
#include "tessera/dtensor/tangent.h"
#include "tessera/ops/kernels/added_bias.h"
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
constexpr ContractOp kAdd = "add";  // adds a bias to a plain result

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

std::string by(const Contract& contract) { return fmt::format("{} ({})", contract.path, contract.style); }

// Returns `placements` of a tensor of `shape`, with `there` on the contract's mesh dimension. `what` names the tensor
// in the error.
Placements as_contract_says(const Placements& placements, const Contract& contract, const Placement& there,
                            at::IntArrayRef shape, std::string_view op, const char* what) {
  const auto ndim = static_cast<int64_t>(shape.size());
  Placements out = on_mesh_dim(placements, contract.mesh_dim, there, ndim);
  const Placement& placed = out.at(static_cast<std::size_t>(contract.mesh_dim));
  if (!placed.is_shard() || (placed.tensor_dim() >= 0 && placed.tensor_dim() < ndim)) return out;
  throw std::invalid_argument(fmt::format(
      "{} with {}: the style lays the {} out as {}, and it is [{}], of {} dimensions; give the style a layout that "
      "fits",
      op, by(contract), what, to_string(there), fmt::join(shape, ", "), ndim));
}

Placements replicated_on(const DeviceMesh& mesh) {
  return Placements(static_cast<std::size_t>(mesh.ndim()), Replicate());
}

// Refuses a plain activation without this rank's part of the features that the product sums over. Where it has all of
// them and parts have one size, every rank sees that. Any other number this rank alone may have, so that it fails the
// job.
void check_features(const at::Tensor& piece, const std::vector<int64_t>& shape, const Placements& placements,
                    const Contract& contract, const DeviceMesh& mesh, std::string_view op) {
  const int64_t all = shape.back(), given = piece.size(-1), ranks = mesh.size(contract.mesh_dim);
  if (!mesh.is_member() || given * ranks == all) return;
  const int64_t mine = intern_spec(mesh, placements, shape, piece.scalar_type())->local_sizes.back();
  if (given == mine) return;
  const std::string where = fmt::format("{} with {}", op, by(contract));
  const std::string text = fmt::format(
      "a plain input counts as this rank's piece {}, of {} of the {} features that the product sums over, and [{}] has "
      "{}; if it is the whole, give the style input_layouts = Replicate(), else pass this rank's piece, or a DTensor",
      to_string(contract.input), mine, all, fmt::join(piece.sizes(), ", "), given);
  if (given != all || mine * ranks != all) mesh.world().fail(where, text);
  throw std::invalid_argument(where + ": " + text);
}

// Returns the global shape of a plain activation that is a piece. If its last dimension is the one that the product
// sums over, the parameter tells its size; elsewhere the partition does, where it fixes one.
std::vector<int64_t> global_shape(const at::Tensor& piece, const Placements& placements, const Contract& contract,
                                  const at::Tensor& parameter, std::string_view op) {
  const DeviceMesh& mesh = mesh_of(parameter);
  std::vector<int64_t> shape = piece.sizes().vec();
  const Placement& cut = placements.at(static_cast<std::size_t>(contract.mesh_dim));
  if (!cut.is_shard()) return shape;
  int64_t& size = shape.at(static_cast<std::size_t>(cut.tensor_dim()));
  if ((op == "matmul" || op == "addmm") && cut.tensor_dim() == piece.dim() - 1) {
    size = parameter.size(0);
    check_features(piece, shape, placements, contract, mesh, op);
  } else {
    size = cut.partition().size().value_or(size * mesh.size(contract.mesh_dim));
  }
  return shape;
}

// Returns a plain activation as a DTensor: it is this rank's piece, laid out as the contract's input.
at::Tensor from_piece(const at::Tensor& piece, const Contract& contract, const at::Tensor& parameter,
                      std::string_view op) {
  const DeviceMesh& mesh = mesh_of(parameter);
  if (!contract.data_dims.empty() && !c10::InferenceMode::is_enabled()) {
    throw std::invalid_argument(fmt::format(
        "{} with {}: a plain activation [{}] on the mesh {} with data dimensions: nobody can know which part of "
        "the batch it is. Pass from_local(piece, mesh, {{Shard(0) on the data dimensions}}); if forward makes it for "
        "all ranks alike, such as positions, pass distribute_tensor(t, mesh, {{Replicate() on each}}), or leave the "
        "module out of the plan",
        op, contract.path, fmt::join(piece.sizes(), ", "), mesh.to_string()));
  }
  const Placements placements =
      normalize(as_contract_says(replicated_on(mesh), contract, contract.input, piece.sizes(), op, "plain input"),
                mesh.mesh(), piece.dim(), fmt::format("{} with {}", op, contract.path));
  FromLocalOptions options;
  options.shape = global_shape(piece, placements, contract, parameter, op);
  return from_local(piece, mesh, placements, options);
}

// Holds an activation as a DTensor, and the layout that the contract asks for.
struct Activation {
  at::Tensor tensor;
  Placements desired;
  std::shared_ptr<const int> uses;  // shared counter of the contracts that use it; see add_reduction_hook
};

Activation activation_of(const at::Tensor& x, const Contract& contract, const at::Tensor& parameter,
                         std::string_view op) {
  Activation out{.tensor = is_dtensor(x) ? x : from_piece(x, contract, parameter, op), .desired = {}, .uses = {}};
  out.uses = detail::add_reduction_hook(out.tensor);
  const Spec& spec = spec_of(out.tensor);
  if (!(spec.mesh == mesh_of(parameter))) {
    throw std::invalid_argument(fmt::format("{} with {}: the activation is {}, the parameter {}; put both on one mesh",
                                            op, contract.path, to_string(spec), to_string(spec_of(parameter))));
  }
  out.desired = as_contract_says(spec.placements, contract, contract.desired, out.tensor.sizes(), op, "input");
  return out;
}

at::Tensor bring_activation(const at::Tensor& x, const Contract& contract, const at::Tensor& parameter,
                            std::string_view op) {
  const Activation given = activation_of(x, contract, parameter, op);
  return detail::redistribute_shared(given.tensor, given.desired);
}

// Calls the operator's own autograd kernel, which LibTorch registers for all backends.
void call_libtorch(const c10::OperatorHandle& op, Stack& stack) {
  op.callBoxedForDispatchKey(c10::DispatchKey::Autograd, stack);
}

// ---- a bias that is added to a plain result -------------------------------------------------------------------

// Holds the last plain result that a contract has returned on this thread on a mesh of several dimensions, and how the
// whole result is laid out.
struct LocalResult {
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl>> tensor;
  std::vector<int64_t> sizes;  // of the piece
  uint64_t mesh_id = 0;
  Placements layout;
};
thread_local LocalResult last_local;

// Says whether `result` is the last plain result, as it was returned, laid out as this contract says.
bool is_last_local(const at::Tensor& result, const Contract& contract, const DeviceMesh& mesh) {
  if (!last_local.tensor || last_local.tensor->lock().get() != result.unsafeGetTensorImpl()) return false;
  if (last_local.mesh_id != mesh.id() || result.sizes() != at::IntArrayRef(last_local.sizes)) return false;
  const Placements wanted =
      on_mesh_dim(last_local.layout, contract.mesh_dim, contract.output.value_or(Replicate()), result.dim());
  return wanted == last_local.layout;
}

// Returns the layout of the gradient of a bias that is added to the plain `result`, where that of the bias's own piece
// is `gradient` along the contract's mesh dimension: a sum over the ranks that hold other parts of the result. Returns
// nullopt where nobody knows how the result is laid out.
std::optional<Placements> bias_gradient(Placements gradient, const at::Tensor& result, const Contract& contract,
                                        const DeviceMesh& mesh) {
  const bool known = is_last_local(result, contract, mesh);
  for (int64_t mesh_dim = 0; mesh_dim < mesh.ndim(); ++mesh_dim) {
    if (mesh_dim == contract.mesh_dim || mesh.size(mesh_dim) == 1) continue;
    if (!known) return std::nullopt;
    const auto d = static_cast<std::size_t>(mesh_dim);
    const Placement& placement = last_local.layout[d];
    if (placement.is_partial() || placement.is_shard(result.dim() - 1)) return std::nullopt;
    if (placement.is_shard()) gradient[d] = Partial();
  }
  return gradient;
}

// Returns the piece of `bias` that fits the plain `result`, which is laid out as the contract's output. Where the
// result is cut along another dimension than the bias's, every rank adds the whole bias to its part, and the bias's
// gradient is a sum over ranks.
at::Tensor local_bias(const at::Tensor& bias, const Contract& contract, const at::Tensor& result) {
  const DeviceMesh& mesh = mesh_of(bias);
  const Placement output = contract.output.value_or(Replicate());
  const bool last = output.is_shard() && (output.tensor_dim() == -1 || output.tensor_dim() == result.dim() - 1);
  const Placement cut = last ? output.on(bias.dim() - 1) : Placement(Replicate());
  const Placements layout = on_mesh_dim(placements_of(bias), contract.mesh_dim, cut, bias.dim());
  const Placements own =
      on_mesh_dim(layout, contract.mesh_dim, last ? cut : (output.is_shard() ? Partial() : Replicate()), bias.dim());
  if (!bias.requires_grad() || !at::GradMode::is_enabled()) return to_local(redistribute(bias, layout), own);
  const std::optional<Placements> gradient = bias_gradient(own, result, contract, mesh);
  if (!gradient) {
    throw std::invalid_argument(fmt::format(
        "add with {}: a plain output (use_local_output) on the mesh {}: nobody can know which part of the batch it is, "
        "and so how the bias's gradient is summed. Add the bias to the product itself, or leave use_local_output out",
        by(contract), mesh.to_string()));
  }
  return to_local(redistribute(bias, layout), gradient);
}

// Returns the contract of `other` if it is a bias and `self` is a plain result, else nullptr.
const Contract* beside_local(const at::Tensor& self, const at::Tensor& other) {
  if (detail::is_dtensor(self) || !detail::is_dtensor(other)) return nullptr;
  const Contract* const contract = contract_for(detail::meta(other).contract, kAdd.name);
  return contract != nullptr && contract->use_local_output ? contract : nullptr;
}

// Returns the key set that selects LibTorch's autograd kernel for all backends, which ours replaces for this backend.
c10::DispatchKeySet past_ours(c10::DispatchKeySet keys) {
  return (keys - c10::autograd_dispatch_keyset) | c10::DispatchKeySet(c10::DispatchKey::AutogradOther);
}

// Computes self + alpha * other where self is a plain result and other a bias with a contract. Any other call is passed
// to LibTorch's kernel.
template <class Op, class Result, class Self>
Result add_kernel(c10::DispatchKeySet keys, Self self, const at::Tensor& other, const at::Scalar& alpha) {
  const Contract* const contract = beside_local(self, other);
  if (contract == nullptr) return Op::redispatch(past_ours(keys), self, other, alpha);
  return Op::call(self, local_bias(other, *contract, self), alpha);
}

// Does the same under InferenceMode.
bool add_in_inference(const c10::OperatorHandle& op, Stack& stack) {
  const std::size_t n = op.schema().arguments().size();
  if (n != 3 || !argument(stack, n, 0).isTensor() || !argument(stack, n, 1).isTensor()) return false;
  const at::Tensor self = argument(stack, n, 0).toTensor(), other = argument(stack, n, 1).toTensor();
  const Contract* const contract = beside_local(self, other);
  if (contract == nullptr) return false;
  stack[stack.size() - n + 1] = local_bias(other, *contract, self);
  op.callBoxed(stack);
  return true;
}

// `y` is the result of an operator, which nobody else reads.
at::Tensor bring_result(at::Tensor y, const Contract& contract, std::string_view op) {
  if (contract.output) {
    const Spec& spec = spec_of(y);
    const Placements to = as_contract_says(spec.placements, contract, *contract.output, y.sizes(), op, "output");
    // Each term of a sum needs the whole gradient. It is gathered here once, not by every operator that uses it.
    if (to == spec.placements) {
      detail::add_layout_hook(y, contract.path);
    } else {
      y = detail::redistribute_result(y, to, {.grad_placements = without_partial(spec.placements)});
    }
  }
  if (!contract.use_local_output) return y;
  at::Tensor local = to_local(y);
  if (mesh_of(y).ndim() > 1) {
    last_local = {.tensor = c10::weak_intrusive_ptr<c10::TensorImpl>(local.getIntrusivePtr()),
                  .sizes = local.sizes().vec(),
                  .mesh_id = mesh_of(y).id(),
                  .layout = placements_of(y)};
  }
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
  const Activation given = activation_of(a, *contract, b, kMatmul.name);
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
