#include "tessera/dtensor/dispatch/call.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <complex>
#include <stdexcept>
#include <string_view>

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/core/tensor_lists.h"
#include "tessera/dtensor/tangent.h"
#include "tessera/mesh/collectives/replicated_check.h"
#include "tessera/mesh/core/backward_pass.h"
#include "tessera/mesh/core/in_memory.h"
#include "tessera/mesh/mesh_checks.h"
#include "tessera/ops/rules/rule.h"

namespace tessera::dispatch {
namespace {

// Lists the operators other than views whose result gets the contract of their input; every view's result does.
constexpr std::array kKeepContract = {"aten::_to_copy", "aten::clone", "aten::contiguous", "aten::_unsafe_view"};
// Lists the operators, by rule name, that multiply or divide and whose rules let a Partial through.
constexpr std::array kScales = {
    "mul",    "div",  "add",  "sub", "rsub",  "addcmul",   "addcdiv",          "addmm", "addmv", "baddbmm",
    "addbmm", "addr", "lerp", "dot", "ldexp", "index_add", "mse_loss_backward"};
// Lists the operators, by rule name, of which a decision holds for one value of each number. Their rules use the
// values: the one written over pending terms decides which of them pass, and the exponent whether an integer may be
// raised to it; or LibTorch refuses some values, which must be found before a piece is computed. A user's rule may use
// any value.
constexpr std::array kByValue = {"constant_pad_nd",
                                 "fill",
                                 "histc",
                                 "index_fill",
                                 "masked_fill",
                                 "pow",
                                 "scatter",
                                 "celu",
                                 "softshrink",
                                 "renorm",
                                 "rrelu_with_noise",
                                 "leaky_relu_backward",
                                 "elu_backward",
                                 "softshrink_backward"};
constexpr std::array kShapeChangers = {"aten::resize_", "aten::resize_as_", "aten::set_"};
// Lists the operators, by rule name, that take tensors of the host beside those of a GPU, such as indices and
// the batch sizes of packed sequences. Those on lists take factors.
constexpr std::array kAcrossDevices = {
    "copy", "bernoulli", "index",    "_unsafe_index", "index_put", "_index_put_impl", "_unsafe_index_put",
    "lstm", "gru",       "rnn_tanh", "rnn_relu"};

template <std::size_t N>
bool contains(const std::array<const char*, N>& names, const std::string& name) {
  return std::any_of(names.begin(), names.end(), [&](const char* n) { return name == n; });
}

// Returns a hint for calls in forward mode, where LibTorch's formula may make plain zeros for an operand without a
// tangent.
std::string forward_mode_hint() {
  if (!detail::in_forward_mode()) return "";
  return ". If LibTorch made it, for an operand without a forward-mode derivative: give each operand one, "
         "zeros_like(operand) where it is zero";
}

// Returns a hint for a parameter of a module that parallelize_module has converted: its forward was called by itself.
std::string call_hint(const Call& call) {
  const std::string* const path = contract_path(call);
  if (path == nullptr) return "";
  return fmt::format(
      ". The operator uses {} of a module that parallelize_module has converted: call what "
      "parallelize_module returned, in the place of the module, or its call() for another function than "
      "forward; masks and constants then count as replicated, and inputs that may be a part of the batch "
      "are refused",
      *path);
}

// Returns a hint on which call may have written a plain tensor into a DTensor, or beside one, without the caller seeing
// it.
std::string origin_hint(const Call& call, const at::Tensor& plain) {
  if (call.traits.name == "aten::set_") {
    return ". torch::load cannot fill DTensors: call it before parallelize_module, or load_weights afterwards";
  }
  if (call.traits.name != "aten::copy_") return old_state_hint(call, plain);
  return ". torch::nn::init::orthogonal_ draws a plain tensor on each rank and copies it: tessera::orthogonal_ "
         "(tessera/dtensor/init.h) fills a DTensor in its place";
}

[[noreturn]] void refuse_plain(const Call& call, const at::Tensor& plain) {
  throw std::invalid_argument(fmt::format(
      "{}: a plain tensor [{}] among DTensors, the first of them {}{}. Make it one by from_local (each "
      "rank has its piece) or distribute_tensor (each rank has the whole); or hold an ImplicitReplication "
      "guard, under which plain tensors count as replicated: right for what every rank has alike, and wrong "
      "for a part of the batch",
      call.traits.name, fmt::join(plain.sizes(), ", "), to_string(*call.first_spec),
      origin_hint(call, plain) + call_hint(call) + forward_mode_hint()));
}

// Lists the operators, without "aten::", that multiply a weight by an activation.
constexpr std::array kProducts = {"mm",    "bmm",   "matmul", "dense",   "batched_matmul", "mv",
                                  "addmm", "addmv", "addbmm", "baddbmm", "dense_bias"};

// Says whether the argument is what a product is added to.
bool is_addend(std::string_view op, std::size_t arg) {
  return op == "dense_bias" ? arg == 2 : arg == 0 && (op.starts_with("add") || op.starts_with("badd"));
}

// Throws if the activation of a weight is plain on a mesh that splits the batch: it might be a part of the batch.
void refuse_part_of_batch(const Call& call, const TensorArg& arg, const detail::Meta& weight, std::string_view op) {
  const ContractPtr& contract = weight.contract;
  if (contract == nullptr || contract->data_dims.empty() || std::ranges::find(kProducts, op) == kProducts.end()) return;
  if (is_addend(op, arg.arg) || c10::InferenceMode::is_enabled()) return;
  const at::Tensor& plain = *arg.tensor;
  throw std::invalid_argument(
      fmt::format("{}: a plain tensor [{}] is used with {} on the mesh {} with data dimensions: nobody can know which "
                  "part of the batch it is. Give from_local(piece, mesh, {{Shard(0) on the data dimensions}}), or "
                  "distribute_tensor where each rank has the whole, or where it is no part of a batch",
                  call.traits.name, fmt::join(plain.sizes(), ", "), contract->path, weight.spec->mesh.to_string()));
}

// Throws if the contract of a parameter in the call takes a plain tensor as this rank's piece. Operators that apply
// contracts never get here with one, and any other must not take the piece for the whole. A tensor that the call writes
// is not an activation.
void refuse_piece(const Call& call, const TensorArg& plain) {
  if (call.writes(plain)) return;
  std::string_view op = std::string_view(call.traits.name).substr(call.traits.name.find("::") + 2);
  if (op.ends_with('_')) op.remove_suffix(1);
  for (const TensorArg& entry : call.tensors) {
    if (!detail::is_dtensor(*entry.tensor) || call.writes(entry)) continue;
    const detail::Meta& parameter = detail::meta(*entry.tensor);
    const Contract* const contract = piece_contract(parameter.contract, op);
    if (contract == nullptr) {
      refuse_part_of_batch(call, plain, parameter, op);
      continue;
    }
    throw std::invalid_argument(fmt::format(
        "{}: a plain tensor [{}] is used with {}, whose style {} says that it is this rank's piece, {}; "
        "give a DTensor, by "
        "from_local(piece, mesh, placements), or by distribute_tensor where each rank has the whole; or register "
        "a constant of the module, such as a mask, as its buffer before parallelize_module",
        call.traits.name, fmt::join(plain.tensor->sizes(), ", "), contract->path, contract->style,
        to_string(contract->input)));
  }
}

// Throws if a plain tensor is on another device than the mesh: the operator would throw on the pieces, which fails the
// job. Users' operators may take it.
void refuse_elsewhere(const Call& call, const at::Tensor& plain) {
  const DeviceMesh& mesh = call.first_spec->mesh;
  if (is_on_device(plain, mesh)) return;
  const std::string& name = call.traits.name;
  if (!call.traits.is_of_libtorch() || name.starts_with("aten::_foreach_")) return;
  if (contains(kAcrossDevices, call.traits.rule_name)) return;
  throw std::invalid_argument(fmt::format(
      "{}: a plain tensor [{}] on {} among DTensors on {}, the first of them {}; bring it there by .to(\"{}\")", name,
      fmt::join(plain.sizes(), ", "), plain.device().str(), mesh.device().str(), to_string(*call.first_spec),
      mesh.device().str()));
}

// Gives the call a DTensor over the memory of a plain tensor that it writes in backward. On a rank outside the mesh the
// DTensor has no piece, and the plain tensor stays as it is.
void write_through(Call& call, TensorArg& entry) {
  at::IValue& value = call.arg(entry.arg);
  const at::Tensor plain = value.toTensor();
  const DeviceMesh& mesh = call.first_spec->mesh;
  const at::Tensor piece = mesh.is_member() ? plain.detach() : at::empty({0}, plain.options());
  value = detail::wrap(piece, replicated_spec(mesh, plain));
  entry.tensor = &value.toTensor();
  entry.spec = detail::meta(*entry.tensor).spec.get();
  call.written_plain.push_back({.arg = entry.arg, .tensor = plain, .over = *entry.tensor});
}

void add_plain(Call& call, TensorArg& entry, PlainTensors plain) {
  const at::Tensor& t = *entry.tensor;
  if (t.dim() > 0) refuse_elsewhere(call, t);
  if (in_backward() && call.writes(entry) && call.arg(entry.arg).isTensor()) {
    write_through(call, entry);
    return;
  }
  // Zeros that LibTorch's formulas make, in forward mode too, where a derivative is zero: the same on every rank.
  const bool derivative = in_backward() || !has_memory(t);
  if (!derivative) {
    if (t.dim() > 0) {
      refuse_piece(call, entry);
      if (!ImplicitReplication::enabled()) refuse_plain(call, t);
    }
    if (plain == PlainTensors::kCompared) check_replicated(t, call.first_spec->mesh, call.traits.name);
  }
  if (t.dim() == 0) return;
  call.replicated.push_back(replicated_spec(call.first_spec->mesh, t));
  entry.spec = call.replicated.back().get();
}

void add_dtensor(Call& call, TensorArg& entry) {
  entry.spec = detail::meta(*entry.tensor).spec.get();
  if (call.first_spec == nullptr) call.first_spec = entry.spec;
  detail::check_current(*entry.tensor, call.traits.name.c_str());
  if (entry.spec->mesh == call.first_spec->mesh) return;
  throw std::invalid_argument(
      fmt::format("{}: DTensors on different meshes, {} and {}; bring them to one mesh first, by redistribute_to, or "
                  "by full_tensor and distribute_tensor",
                  call.traits.name, to_string(*call.first_spec), to_string(*entry.spec)));
}

// Returns the index of the result that is this written argument: the schema gives both the same letter.
int result_of(const c10::FunctionSchema& schema, const c10::Argument& written) {
  for (std::size_t k = 0; k < schema.returns().size(); ++k) {
    const auto* const alias = schema.returns()[k].alias_info();
    if (alias != nullptr && alias->isWrite() && alias->beforeSets() == written.alias_info()->beforeSets()) {
      return static_cast<int>(k);
    }
  }
  return -1;
}

}  // namespace

OpTraits::OpTraits(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  name = schema.name();
  rule_name = rules::rule_key(name);
  num_args = schema.arguments().size();
  uses_numbers = contains(kByValue, rule_name) || name.rfind("aten::", 0) != 0;
  for (std::size_t i = 0; i < num_args; ++i) {
    const c10::Argument& a = schema.arguments()[i];
    const auto type = a.type()->kind() == c10::TypeKind::OptionalType
                          ? a.type()->expectRef<c10::OptionalType>().getElementType()->kind()
                          : a.type()->kind();
    number_arg.push_back(type == c10::TypeKind::NumberType && !uses_numbers);
    if (type == c10::TypeKind::GeneratorType) generator_arg = static_cast<int>(i);
    if (a.name() == "dropout_p") dropout_arg = static_cast<int>(i);
    if (a.alias_info() == nullptr) continue;
    if (a.alias_info()->isWrite()) {
      written_args.push_back(i);
      written_results.push_back(result_of(schema, a));
      if (a.kwarg_only()) out_args.push_back(i);
    } else {
      view = true;
    }
  }
  if (rule_name == "div") divisor_arg = 1;
  if (rule_name == "addcdiv") divisor_arg = 2;
  random = op.hasTag(at::Tag::nondeterministic_seeded);
  scales = contains(kScales, rule_name);
  is_view_as_real = rule_name == "view_as_real";
  keeps_contract = view || contains(kKeepContract, name);
  changes_shape_in_place = contains(kShapeChangers, name);
}

const std::string* contract_path(const Call& call) {
  for (const TensorArg& entry : call.tensors) {
    if (entry.spec == nullptr || !detail::is_dtensor(*entry.tensor)) continue;
    if (const ContractPtr& contract = detail::meta(*entry.tensor).contract) return &contract->path;
  }
  return nullptr;
}

std::string old_state_hint(const Call& call, const at::Tensor& plain) {
  const bool alike = std::any_of(call.tensors.begin(), call.tensors.end(), [&](const TensorArg& entry) {
    return detail::is_dtensor(*entry.tensor) && entry.tensor->sizes() == plain.sizes();
  });
  if (!alike || call.traits.written_args.empty()) return "";
  return ". If this is an optimizer's step: one that was made, stepped or filled by torch::load before "
         "parallelize_module keeps plain state; make it afterwards, and use load_optimizer";
}

bool Call::writes(const TensorArg& entry) const {
  return std::find(traits.written_args.begin(), traits.written_args.end(), entry.arg) != traits.written_args.end();
}

namespace {

bool is_zero_or_nonfinite(const at::Scalar& number) {
  const double size = number.isComplex() ? std::abs(number.toComplexDouble()) : std::abs(number.toDouble());
  return size == 0 || !std::isfinite(size);
}

bool is_zero_or_nonfinite(const TensorArg& entry, bool divides) {
  if (!entry.tensor->defined()) return false;
  const bool distributed = entry.spec != nullptr && detail::is_dtensor(*entry.tensor);
  // A plain tensor may differ from rank to rank, on which the collectives would then depend.
  if (!distributed && !entry.tensor->unsafeGetTensorImpl()->is_wrapped_number()) return entry.tensor->numel() == 1;
  if (distributed && !all_replicate(entry.spec->placements)) return divides && entry.spec->numel() == 1;
  if (distributed && entry.spec->mesh.world().is_fake()) return false;
  // A rank outside the mesh does not see the number.
  if (distributed && entry.spec->mesh.size() < entry.spec->mesh.world().size()) return entry.spec->numel() == 1;
  const at::Tensor& local = distributed ? detail::meta(*entry.tensor).local() : *entry.tensor;
  // A number on a GPU may be one: the host would wait to see it.
  return local.numel() == 1 && (!local.is_cpu() || is_zero_or_nonfinite(local.item()));
}

}  // namespace

int OpTraits::written_result(std::size_t arg) const {
  const auto at = std::ranges::find(written_args, arg);
  return written_results.at(static_cast<std::size_t>(at - written_args.begin()));
}

bool draws(const Call& call) {
  const int dropout = call.traits.dropout_arg;
  return call.traits.random && (dropout < 0 || call.arg(static_cast<std::size_t>(dropout)).toDouble() != 0);
}

bool has_zero_or_nonfinite_number(const Call& call) {
  if (!call.traits.scales) return false;
  const auto pending = [](const TensorArg& entry) { return entry.spec != nullptr && entry.spec->partial; };
  if (std::none_of(call.tensors.begin(), call.tensors.end(), pending)) return false;
  for (std::size_t i = 0; i < call.traits.num_args; ++i) {
    if (call.traits.number_arg[i] && call.arg(i).isScalar() && is_zero_or_nonfinite(call.arg(i).toScalar()))
      return true;
  }
  return std::any_of(call.tensors.begin(), call.tensors.end(), [&](const TensorArg& entry) {
    return is_zero_or_nonfinite(entry, static_cast<int>(entry.arg) == call.traits.divisor_arg);
  });
}

void return_plain(const Call& call) {
  for (const WrittenPlain& each : call.written_plain) {
    const detail::Meta& meta = detail::meta(each.over);
    const bool stays = each.tensor.dim() == 0 && has_memory(each.tensor);
    if (!stays) detail::convert_in_place(each.tensor, meta.local(), meta.spec);
    const int result = call.traits.written_result(each.arg);
    if (result >= 0) call.stack[call.base + static_cast<std::size_t>(result)] = each.tensor;
  }
}

void refuse_sizes(const std::string& op, at::IntArrayRef result, at::IntArrayRef written, std::string_view or_else) {
  throw std::invalid_argument(
      fmt::format("{}: the result is [{}], and would be written to [{}]; give a tensor of its sizes{}", op,
                  fmt::join(result, ", "), fmt::join(written, ", "), or_else));
}

Call read_call(const c10::OperatorHandle& op, const OpTraits& traits, torch::jit::Stack& stack,
               PlainTensors plain_tensors) {
  Call call{.op = op,
            .traits = traits,
            .stack = stack,
            .base = stack.size() - traits.num_args,
            .tensors = {},
            .replicated = {},
            .gathered = {},
            .written_plain = {},
            .contract_from_parameters = {}};
  bool plain = false;
  const auto add = [&](std::size_t arg, std::size_t index, const at::Tensor& t) {
    TensorArg& entry = call.tensors.emplace_back(TensorArg{.arg = arg, .index = index, .tensor = &t});
    if (!t.defined()) return;
    if (detail::is_dtensor_impl(t.unsafeGetTensorImpl())) {
      add_dtensor(call, entry);
    } else {
      plain = true;
    }
  };
  static const at::Tensor absent;
  for (std::size_t i = 0; i < traits.num_args; ++i) {
    at::IValue& value = call.arg(i);
    if (value.isTensor() || detail::is_tensor_list(value)) {
      detail::each_tensor(value, [&](const at::Tensor& t, std::size_t index) { add(i, index, t); });
    } else if (value.isNone() && op.schema().arguments()[i].type()->isSubtypeOf(*c10::OptionalType::ofTensor())) {
      add(i, 0, absent);
    }
  }
  if (call.first_spec == nullptr) throw std::logic_error(traits.name + ": dispatched to DTensors without one");
  if (!plain) return call;
  for (TensorArg& entry : call.tensors) {
    if (entry.spec == nullptr && entry.tensor->defined()) add_plain(call, entry, plain_tensors);
  }
  return call;
}

}  // namespace tessera::dispatch
