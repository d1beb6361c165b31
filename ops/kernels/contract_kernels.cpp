// Whole-operator kernels where a style's contract (dtensor/contract.h) meets an activation. They stand above autograd, so that
// bringing an activation into its layout is differentiable, and at the DTensor key for InferenceMode, which excludes autograd.

#include <array>
#include <stdexcept>

#include <ATen/ops/addmm.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/library.h>

#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/modes.h"
#include "tessera/dtensor/tensor.h"
#include "tessera/ops/kernels/matmul.h"

namespace tessera {
namespace {

using torch::jit::Stack;

// Where an operator has its activation and its parameter.
struct Site {
  std::string_view op;  // base name, as contracts name it
  std::size_t activation;
  std::size_t parameter;
};
constexpr std::array kSites = {Site{"matmul", 0, 1},     Site{"addmm", 1, 2},      Site{"embedding", 1, 0},
                               Site{"layer_norm", 0, 2}, Site{"group_norm", 0, 2}, Site{"rms_norm", 0, 2},
                               Site{"conv2d", 0, 1}};

const Site& site_of(std::string_view op) {
  for (const Site& site : kSites) {
    if (site.op == op) return site;
  }
  throw std::logic_error(fmt::format("no contract site for {}", op));
}

std::string_view base_name(const c10::OperatorHandle& op) {
  const std::string_view name = op.schema().name();
  return name.substr(name.find("::") + 2);
}

// The contract that the call's parameter carries for this operator, or nullptr.
ContractPtr contract_at(const Site& site, const Stack& args) {
  const at::IValue& value = args.at(site.parameter);
  if (!value.isTensor() || !detail::is_dtensor(value.toTensor())) return nullptr;
  const ContractPtr& all = detail::meta(value.toTensor()).contract;
  const Contract* found = contract_for(all, site.op);
  return found == nullptr ? nullptr : ContractPtr(all, found);
}

Placements replicated_on(const DeviceMesh& mesh) { return Placements(static_cast<std::size_t>(mesh.ndim()), Replicate()); }

// The global shape of a plain activation's pieces. Where its last dimension is the product's summed one, the parameter knows it.
std::vector<int64_t> global_shape(const at::Tensor& piece, const Placements& placements, const DeviceMesh& mesh,
                                  const at::Tensor& parameter, std::string_view op) {
  std::vector<int64_t> shape = piece.sizes().vec();
  for (std::size_t i = 0; i < placements.size(); ++i) {
    if (!placements[i].is_shard()) continue;
    const int64_t dim = placements[i].tensor_dim();
    const bool summed = (op == "matmul" || op == "addmm") && dim == piece.dim() - 1;
    int64_t& size = shape.at(static_cast<std::size_t>(dim));
    size = summed ? parameter.size(0) : size * mesh.size(static_cast<int64_t>(i));
  }
  return shape;
}

// A plain activation is this rank's piece, laid out as the contract's input.
at::Tensor from_piece(const at::Tensor& piece, const Contract& contract, const at::Tensor& parameter, std::string_view op) {
  const DeviceMesh& mesh = mesh_of(parameter);
  if (!contract.data_dims.empty()) {
    throw std::invalid_argument(
        fmt::format("{} with {}: a plain activation [{}] on the mesh {} with data dimensions: nobody can know which part of "
                    "the batch it is. "
                    "Pass from_local(piece, mesh, {{Shard(0) on the data dimensions}})",
                    op, contract.path, fmt::join(piece.sizes(), ", "), mesh.to_string()));
  }
  const Placements placements = normalize(on_mesh_dim(replicated_on(mesh), contract.mesh_dim, contract.input, piece.dim()),
                                          mesh.mesh(), piece.dim(), fmt::format("{} with {}", op, contract.path));
  FromLocalOptions options;
  options.shape = global_shape(piece, placements, mesh, parameter, op);
  return from_local(piece, mesh, placements, options);
}

at::Tensor bring_activation(const at::Tensor& x, const Contract& contract, const at::Tensor& parameter,
                            std::string_view op) {
  const at::Tensor activation = is_dtensor(x) ? x : from_piece(x, contract, parameter, op);
  const Spec& spec = spec_of(activation);
  if (!(spec.mesh == mesh_of(parameter))) {
    throw std::invalid_argument(fmt::format("{} with {}: the activation is {}, the parameter {}; put both on one mesh", op,
                                            contract.path, to_string(spec), to_string(spec_of(parameter))));
  }
  return redistribute(activation, on_mesh_dim(spec.placements, contract.mesh_dim, contract.desired, spec.ndim()));
}

at::Tensor bring_result(const at::Tensor& y, const Contract& contract) {
  at::Tensor out = y;
  if (contract.output) {
    const Spec& spec = spec_of(y);
    out = redistribute(y, on_mesh_dim(spec.placements, contract.mesh_dim, *contract.output, spec.ndim()));
  }
  return contract.use_local_output ? to_local(out) : out;
}

using Continuation = void (*)(const c10::OperatorHandle& op, Stack& stack);

// Applies the contract, if there is one, around `go_on`, which replaces the arguments on the stack by the results.
void with_contract(const c10::OperatorHandle& op, Stack& stack, Continuation go_on) {
  const Site& site = site_of(base_name(op));
  const std::size_t n = op.schema().arguments().size();
  Stack args(stack.end() - static_cast<std::ptrdiff_t>(n), stack.end());
  const ContractPtr contract = contract_at(site, args);
  if (contract != nullptr) {
    const at::Tensor parameter = args[site.parameter].toTensor();
    const World::Scope scope(mesh_of(parameter).world(), op.schema().name().c_str(), &contract->path);
    args[site.activation] = bring_activation(args[site.activation].toTensor(), *contract, parameter, site.op);
    go_on(op, args);
    args[0] = bring_result(args[0].toTensor(), *contract);
  } else {
    go_on(op, args);
  }
  stack.resize(stack.size() - n);
  for (at::IValue& value : args) stack.push_back(std::move(value));
}

// ---- how each operator goes on ---------------------------------------------------------------------------------------

void to_autograd(const c10::OperatorHandle& op, Stack& stack) {
  op.callBoxedForDispatchKey(c10::DispatchKey::Autograd, stack);
}
void to_composite(const c10::OperatorHandle& op, Stack& stack) {
  op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, stack);
}
void to_matmul(const c10::OperatorHandle&, Stack& stack) {
  at::Tensor result = matmul(stack[0].toTensor(), stack[1].toTensor());
  stack.assign(1, at::IValue(std::move(result)));
}

template <Continuation GoOn>
void kernel(const c10::OperatorHandle& op, Stack* stack) {
  with_contract(op, *stack, GoOn);
}

// linear(x, w, b) as torch::nn::functional has it: the product, which has the contract, then the bias once.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const bool has_bias = bias && bias->defined();
  if (x.dim() == 2 && has_bias) return at::addmm(*bias, x, weight.t());
  const at::Tensor product = x.matmul(weight.t());
  return has_bias ? product.add(*bias) : product;
}

// ---- a bias added to a local result -----------------------------------------------------------------------------------

// The piece of `bias` that fits a plain result laid out as the contract's output. Where the result is split along another
// dimension than the bias's, every rank adds the whole bias to its part, and the gradient is a sum over ranks.
at::Tensor local_bias(const at::Tensor& bias, const Contract& contract, int64_t result_ndim) {
  const Placement result = contract.output.value_or(Replicate());
  const bool last = result.is_shard() && (result.tensor_dim() == -1 || result.tensor_dim() == result_ndim - 1);
  const Placements layout = on_mesh_dim(placements_of(bias), contract.mesh_dim, last ? Shard(0) : Replicate(), bias.dim());
  const Placements gradient =
      on_mesh_dim(layout, contract.mesh_dim, last ? Shard(0) : (result.is_shard() ? Partial() : Replicate()), bias.dim());
  return to_local(redistribute(bias, layout), gradient);
}

// self + alpha * other where self is a plain local result and other a bias whose contract says so; anything else goes on.
template <bool InPlace>
void add_kernel(const c10::OperatorHandle& op, Stack* stack) {
  const std::size_t base = stack->size() - 3;
  const at::Tensor& self = (*stack)[base].toTensor();
  const at::Tensor& other = (*stack)[base + 1].toTensor();
  if (detail::is_dtensor(self) || !detail::is_dtensor(other)) return to_autograd(op, *stack);
  const ContractPtr all = detail::meta(other).contract;
  const Contract* const contract = contract_for(all, "add");
  if (contract == nullptr || !contract->use_local_output) return to_autograd(op, *stack);
  (*stack)[base + 1] = local_bias(other, *contract, self.dim());
  op.callBoxed(*stack);
}

// ---- InferenceMode ----------------------------------------------------------------------------------------------------

// For operators that have a dispatcher of their own at the DTensor key: it asks here first.
bool in_inference(const c10::OperatorHandle& op, Stack& stack) {
  if (!c10::InferenceMode::is_enabled()) return false;
  thread_local bool inside = false;  // the continuation comes by here again
  if (inside) return false;
  const Site& site = site_of(base_name(op));
  const std::size_t n = op.schema().arguments().size();
  const Stack args(stack.end() - static_cast<std::ptrdiff_t>(n), stack.end());
  if (contract_at(site, args) == nullptr) return false;
  with_contract(op, stack, [](const c10::OperatorHandle& o, Stack& s) {
    inside = true;
    try {
      o.callBoxed(s);
    } catch (...) {
      inside = false;
      throw;
    }
    inside = false;
  });
  return true;
}

[[maybe_unused]] const bool registered = [] {
  for (const char* name : {"addmm", "embedding"}) register_decomposition(name, in_inference);
  return true;
}();

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, m) {
  m.impl("matmul", torch::CppFunction::makeFromBoxedFunction<&kernel<to_matmul>>());
  m.impl("linear", linear);
  m.impl("addmm", torch::CppFunction::makeFromBoxedFunction<&kernel<to_autograd>>());
  m.impl("embedding", torch::CppFunction::makeFromBoxedFunction<&kernel<to_autograd>>());
  for (const char* name : {"layer_norm", "group_norm", "rms_norm", "conv2d"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&kernel<to_composite>>());
  }
  m.impl("add_.Tensor", torch::CppFunction::makeFromBoxedFunction<&add_kernel<true>>());
  m.impl("add.Tensor", torch::CppFunction::makeFromBoxedFunction<&add_kernel<false>>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse3, m) {
  m.impl("matmul", torch::CppFunction::makeFromBoxedFunction<&kernel<to_matmul>>());
  m.impl("linear", linear);
  for (const char* name : {"layer_norm", "group_norm", "rms_norm", "conv2d"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&kernel<to_composite>>());
  }
}

}  // namespace
}  // namespace tessera
