#include "tessera/tests/operators/calls.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include <ATen/ATen.h>

#include "tessera/tests/harness/device.h"
#include "tessera/tests/operators/more_samples.h"
#include "tessera/tests/ops/rules/samples.h"

namespace tessera::testing {
namespace {

using c10::FunctionSchema;
using c10::TypeKind;

bool holds_tensor(const c10::TypePtr& type) {
  if (type->kind() == TypeKind::TensorType) return true;
  if (type->kind() == TypeKind::OptionalType)
    return holds_tensor(type->expectRef<c10::OptionalType>().getElementType());
  return type->kind() == TypeKind::ListType && holds_tensor(type->expectRef<c10::ListType>().getElementType());
}

bool is_out(const c10::Argument& argument) {
  return argument.kwarg_only() && argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

std::string full_name(const std::string& name, const std::string& overload) {
  return overload.empty() ? name : name + "." + overload;
}

std::string base_of(const std::string& full) { return full.substr(0, full.find('.')); }

// ---- calls by hand

const std::map<std::string, std::vector<Sample>>& by_hand() {
  static const auto table = [] {
    at::manual_seed(11);
    std::map<std::string, std::vector<Sample>> out;
    for (const auto family :
         {view_samples, join_samples, indexing_samples, norm_samples, reduction_samples, matmul_samples, nn_samples,
          factory_samples, pointwise_samples, batched_samples, random_samples, more_samples, convolution_samples,
          pooling_samples, model_samples, step_samples}) {
      for (Sample& sample : family()) out[sample.op].push_back(std::move(sample));
    }
    return out;
  }();
  return table;
}

// ---- calls made from the schema

struct Choice {
  at::Tensor tensor;
  int64_t number;
  std::vector<int64_t> list;
};

std::vector<Choice> choices() {
  std::vector<at::Tensor> tensors;
  for (const std::vector<int64_t>& sizes :
       {std::vector<int64_t>{5, 3}, {5, 3, 3}, {2, 3, 6, 6}, {5}, {5, 4, 6}, {2, 2, 4, 4, 4}, {}}) {
    tensors.push_back(at::rand(sizes, at::kDouble) * 0.8 + 0.1);
  }
  tensors.push_back(at::randint(1, 4, {5, 3}, at::kLong));
  tensors.push_back(at::randint(1, 4, {5}, at::kLong));
  tensors.push_back(at::rand({5, 3}) < 0.5);
  tensors.push_back(at::complex(at::rand({5, 3}, at::kDouble), at::rand({5, 3}, at::kDouble)));
  std::vector<Choice> out;
  for (const at::Tensor& tensor : tensors) {
    for (const int64_t number : {1, 0, 2}) {
      for (const std::vector<int64_t>& list :
           {std::vector<int64_t>{1}, {1, 1}, {2, 2}, {5, 3}, {0, 1}, {3}, {1, 1, 1}, {2, 2, 2}}) {
        out.push_back({.tensor = tensor, .number = number, .list = list});
      }
    }
  }
  return out;
}

at::Tensor tensor_for(const std::string& name, const Choice& choice) {
  if (name == "mask" || name == "condition") return at::rand(choice.tensor.sizes()) < 0.5;
  if (name == "index") return at::randint(0, 3, choice.tensor.sizes(), at::kLong);
  if (choice.tensor.scalar_type() == at::kDouble) return at::rand_like(choice.tensor) * 0.8 + 0.1;
  return choice.tensor.clone();
}

std::optional<at::IValue> value_for(const c10::Argument& argument, const c10::TypePtr& type, const Choice& choice) {
  const bool whole_numbers = at::isIntegralType(choice.tensor.scalar_type(), true);
  switch (type->kind()) {
    case TypeKind::TensorType: return tensor_for(argument.name(), choice);
    case TypeKind::NumberType: return whole_numbers ? at::IValue(2) : at::IValue(0.5);
    case TypeKind::FloatType: return at::IValue(0.5);
    case TypeKind::IntType:
    case TypeKind::SymIntType:
      return argument.name() == "dtype" || argument.name() == "out_dtype"
                 ? at::IValue(static_cast<int64_t>(at::kDouble))
                 : at::IValue(choice.number);
    case TypeKind::BoolType: return at::IValue(false);
    case TypeKind::StringType: return at::IValue("sum");
    case TypeKind::OptionalType: return at::IValue();
    case TypeKind::ListType: break;
    default: return std::nullopt;
  }
  const TypeKind element = type->expectRef<c10::ListType>().getElementType()->kind();
  switch (element) {
    case TypeKind::TensorType:
      return at::IValue(
          c10::List<at::Tensor>({tensor_for(argument.name(), choice), tensor_for(argument.name(), choice)}));
    case TypeKind::IntType:
    case TypeKind::SymIntType: {
      // Kernels read as many numbers as the schema says, even if fewer are given.
      std::vector<int64_t> list = choice.list;
      if (!list.empty()) list.resize(std::max<std::size_t>(list.size(), argument.N().value_or(0)), list.back());
      return at::IValue(list);
    }
    case TypeKind::FloatType: return at::IValue(std::vector<double>(choice.list.begin(), choice.list.end()));
    case TypeKind::BoolType: return at::IValue(c10::List<bool>({true, true, true}));
    case TypeKind::NumberType: {
      c10::List<at::Scalar> numbers;
      for (int i = 0; i < 2; ++i) numbers.push_back(whole_numbers ? at::Scalar(2) : at::Scalar(0.5));
      return at::IValue(numbers);
    }
    default: return std::nullopt;
  }
}

bool depends_on(const FunctionSchema& schema, std::initializer_list<TypeKind> kinds) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(), [&](const c10::Argument& a) {
    return !a.default_value() && std::find(kinds.begin(), kinds.end(), a.type()->kind()) != kinds.end();
  });
}

bool draws(const c10::OperatorHandle& op) { return op.hasTag(at::Tag::nondeterministic_seeded); }

// Says whether the values are not set, or are a hash of every bit, which rounding changes.
bool unset(const std::string& name) {
  return name.find("empty") != std::string::npos || name.find("hash_tensor") != std::string::npos;
}

// Says whether the operator ends the process on arguments that do not match each other.
bool unchecked(const std::string& overload) {
  static const std::set<std::string> names = {"_batch_norm_no_update",
                                              "_batch_norm_with_update",
                                              "_native_batch_norm_legit",
                                              "_nnpack_spatial_convolution",
                                              "_sobol_engine_initialize_state_",
                                              "_weight_norm_interface",
                                              "hash_tensor",
                                              "linalg_solve_ex",
                                              "slow_conv_transpose3d"};
  const std::string base = base_of(overload);
  return base.ends_with("_backward") || names.contains(base.substr(std::string("aten::").size()));
}

// Says whether LibTorch has one kernel for all devices, which ends the process on a GPU's tensors.
bool reads_host_memory(const std::string& base) {
  static const std::set<std::string> names = {"_grid_sampler_2d_cpu_fallback",
                                              "_grid_sampler_2d_cpu_fallback_backward",
                                              "_reshape_from_tensor",
                                              "_rowwise_prune",
                                              "_saturate_weight_to_fp16",
                                              "_sobol_engine_draw",
                                              "_sobol_engine_ff_",
                                              "_sobol_engine_initialize_state_",
                                              "_sobol_engine_scramble_",
                                              "_transform_bias_rescale_qkv"};
  return names.contains(base.substr(std::string("aten::").size()));
}

bool succeeds(const Sample& sample) {
  try {
    const WholeCall trial(sample);
    return std::all_of(trial.results().begin(), trial.results().end(),
                       [](const at::Tensor& t) { return !t.defined() || !t.is_sparse(); });
  } catch (const std::exception&) {
    return false;
  }
}

std::vector<Sample> made(const c10::OperatorHandle& op) {
  at::manual_seed(12);
  const FunctionSchema& schema = op.schema();
  const bool numbers = depends_on(schema, {TypeKind::IntType, TypeKind::SymIntType});
  const bool lists = depends_on(schema, {TypeKind::ListType});
  for (const Choice& choice : choices()) {
    if ((!numbers && choice.number != 1) || (!lists && choice.list.size() != 1) || (!lists && choice.list[0] != 1))
      continue;
    Sample sample{.op = full_name(schema.name(), schema.overload_name()),
                  .args = {},
                  .random = draws(op) || unset(schema.name())};
    bool complete = true;
    for (const c10::Argument& argument : schema.arguments()) {
      const auto value =
          argument.default_value() ? argument.default_value() : value_for(argument, argument.type(), choice);
      complete = complete && value.has_value();
      if (complete) sample.args.push_back(*value);
    }
    if (complete && succeeds(sample)) return {std::move(sample)};
  }
  return {};
}

// ---- calls from the functional twin

// Returns the overloads that write nothing, by the operator's name.
const std::multimap<std::string, c10::OperatorHandle>& functional() {
  static const auto table = [] {
    std::multimap<std::string, c10::OperatorHandle> out;
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      const auto op = c10::Dispatcher::singleton().findSchema(name);
      if (!op) continue;
      const auto& arguments = op->schema().arguments();
      const bool writes = std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument& a) {
        return a.alias_info() != nullptr && a.alias_info()->isWrite();
      });
      if (!writes) out.emplace(name.name, *op);
    }
    return out;
  }();
  return table;
}

// Returns the overload that takes the same arguments and writes none of them; "" if there is none.
std::string functional_twin(const FunctionSchema& schema) {
  const bool has_out = std::any_of(schema.arguments().begin(), schema.arguments().end(), is_out);
  std::string base = schema.name();
  if (!has_out && base.ends_with('_') && !base.ends_with("__")) base.pop_back();
  if (!has_out && base == schema.name()) return {};
  std::vector<c10::TypePtr> wanted;
  for (const c10::Argument& a : schema.arguments()) {
    if (!is_out(a)) wanted.push_back(a.type());
  }
  const auto [first, last] = functional().equal_range(base);
  for (auto it = first; it != last; ++it) {
    const FunctionSchema& other = it->second.schema();
    const bool takes = std::equal(other.arguments().begin(), other.arguments().end(), wanted.begin(), wanted.end(),
                                  [](const c10::Argument& a, const c10::TypePtr& type) { return *a.type() == *type; });
    const bool same_overload = has_out || other.overload_name() == schema.overload_name();
    if (same_overload && takes) return full_name(base, other.overload_name());
  }
  return {};
}

std::vector<Sample> as_twin(const c10::OperatorHandle& op, const std::vector<Sample>& samples) {
  std::vector<Sample> out;
  const auto& arguments = op.schema().arguments();
  for (Sample sample : samples) {
    const WholeCall whole(sample);
    sample.args = whole.args();
    std::size_t next = 0;
    for (const c10::Argument& argument : arguments) {
      if (!is_out(argument)) continue;
      if (argument.type()->kind() == TypeKind::ListType) {
        c10::List<at::Tensor> list;
        while (next < whole.results().size()) list.push_back(at::empty_like(whole.results()[next++]));
        sample.args.emplace_back(list);
      } else if (next < whole.results().size() && whole.results()[next].defined()) {
        sample.args.emplace_back(at::empty_like(whole.results()[next++]));
      }
    }
    sample.op = full_name(op.schema().name(), op.schema().overload_name());
    if (sample.args.size() == arguments.size() && succeeds(sample)) out.push_back(std::move(sample));
  }
  return out;
}

bool runs_on_cpu(const c10::OperatorHandle& op) {
  using Key = c10::DispatchKey;
  constexpr std::array kKeys = {Key::CPU, Key::CompositeImplicitAutograd, Key::CompositeExplicitAutograd,
                                Key::CompositeExplicitAutogradNonFunctional};
  return std::any_of(kKeys.begin(), kKeys.end(), [&](Key key) { return op.hasKernelForDispatchKey(key); });
}

}  // namespace

std::vector<std::string> tensor_overloads() {
  std::set<std::string> out;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op) continue;
    const auto& arguments = op->schema().arguments();
    const bool takes = std::any_of(arguments.begin(), arguments.end(),
                                   [](const c10::Argument& a) { return !is_out(a) && holds_tensor(a.type()); });
    if (takes) out.insert(full_name(name.name, name.overload_name));
  }
  return {out.begin(), out.end()};
}

std::string out_of_scope(const std::string& overload) {
  if (overload.find("_flash_attention_for_cpu") != std::string::npos) return "";
  struct Family {
    const char* part;
    const char* reason;
  };
  static constexpr std::array kFamilies = {Family{"sparse", "sparse tensors"},
                                           Family{"coalesce", "sparse tensors"},
                                           Family{"_csr", "sparse tensors"},
                                           Family{"_csc", "sparse tensors"},
                                           Family{"_bsr", "sparse tensors"},
                                           Family{"_bsc", "sparse tensors"},
                                           Family{"_coo", "sparse tensors"},
                                           Family{"crow_", "sparse tensors"},
                                           Family{"ccol_", "sparse tensors"},
                                           Family{"col_indices", "sparse tensors"},
                                           Family{"row_indices", "sparse tensors"},
                                           Family{"sspaddmm", "sparse tensors"},
                                           Family{"hspmm", "sparse tensors"},
                                           Family{"_cslt", "sparse tensors"},
                                           Family{"smm", "sparse tensors"},
                                           Family{"_nnz", "sparse tensors"},
                                           Family{"_dimI", "sparse tensors"},
                                           Family{"_dimV", "sparse tensors"},
                                           Family{"dense_dim", "sparse tensors"},
                                           Family{"::indices", "sparse tensors"},
                                           Family{"::_indices", "sparse tensors"},
                                           Family{"::values", "sparse tensors"},
                                           Family{"::_values", "sparse tensors"},
                                           Family{"native_norm", "sparse tensors"},
                                           Family{"spsolve", "sparse tensors"},
                                           Family{"_spdiags", "sparse tensors"},
                                           Family{"to_dense", "sparse tensors"},
                                           Family{"::quantize", "quantized tensors"},
                                           Family{"::_quantize", "quantized tensors"},
                                           Family{"quantized", "quantized tensors"},
                                           Family{"dequant", "quantized tensors"},
                                           Family{"qscheme", "quantized tensors"},
                                           Family{"::q_", "quantized tensors"},
                                           Family{"int_repr", "quantized tensors"},
                                           Family{"fbgemm", "quantized tensors"},
                                           Family{"moving_avg_obs", "quantized tensors"},
                                           Family{"int4", "quantized tensors"},
                                           Family{"int8pack", "quantized tensors"},
                                           Family{"_4bit", "quantized tensors"},
                                           Family{"choose_qparams", "quantized tensors"},
                                           Family{"nested", "nested tensors"},
                                           Family{"jagged", "nested tensors"},
                                           Family{"padded_tensor", "nested tensors"},
                                           Family{"mkldnn", "oneDNN's tensors"},
                                           Family{"cudnn", "a GPU's operators"},
                                           Family{"miopen", "a GPU's operators"},
                                           Family{"mps", "a GPU's operators"},
                                           Family{"triton", "a GPU's operators"},
                                           Family{"_flash_attention", "a GPU's operators"},
                                           Family{"_efficient_attention", "a GPU's operators"},
                                           Family{"fused_attention_overrideable", "a GPU's operators"},
                                           Family{"product_flash_attention.", "a GPU's operators"},
                                           Family{"mem_eff", "a GPU's operators"},
                                           Family{"chalf", "half complex numbers, which LibTorch calls experimental"},
                                           Family{"vulkan", "a GPU's operators"},
                                           Family{"record_stream", "a GPU's operators"},
                                           Family{"_test_", "LibTorch's own tests"},
                                           Family{"_foobar", "LibTorch's own tests"},
                                           Family{"::set_", "storages"},
                                           Family{"::set.", "storages"},
                                           Family{"resize", "storages"},
                                           Family{"storage", "storages"},
                                           Family{"_lazy_clone", "storages"},
                                           Family{"_copy_from", "storages"},
                                           Family{"is_set_to", "storages"},
                                           Family{"_fw_primal", "forward mode"},
                                           Family{"_make_dual", "forward mode"},
                                           Family{"_unpack_dual", "forward mode"},
                                           Family{"_jvp", "forward mode"},
                                           Family{"pin_memory", "storages"},
                                           Family{"is_pinned", "storages"},
                                           Family{"names", "named tensors"},
                                           Family{"align_", "named tensors"},
                                           Family{"rename", "named tensors"},
                                           Family{"_validate", "sparse tensors"},
                                           Family{"_spdiag", "sparse tensors"}};
  for (const Family& family : kFamilies) {
    if (overload.find(family.part) != std::string::npos) return family.reason;
  }
  if (!device().is_cpu() && reads_host_memory(base_of(overload))) return "LibTorch's kernel reads the host's memory";
  const auto at = overload.find('.');
  if (at != std::string::npos && overload.find("ame", at) != std::string::npos)
    return "named tensors";  // "dimname", "names_out"
  return {};
}

std::string why_not_called(const std::string& overload) {
  static const std::map<std::string, std::string> reasons = {
      {"aten::_backward", "of tensors that require gradients alone; tests/autograd calls it"},
      {"aten::retain_grad", "of tensors that require gradients alone"},
      {"aten::_propagate_xla_data", "of XLA's tensors"},
      {"aten::_thnn_fused_lstm_cell_backward", "its one step has no kernel for CPU tensors"},
      {"aten::_wrapped_linear_prepack", "of quantized weights"},
      {"aten::convolution_overrideable", "a place that backends outside of LibTorch fill"},
      {"aten::convolution_backward_overrideable", "a place that backends outside of LibTorch fill"},
  };
  if (const auto found = reasons.find(base_of(overload)); found != reasons.end()) return found->second;
  const c10::OperatorHandle op = find_op(overload);
  const std::string twin = functional_twin(op.schema());
  const bool runs = runs_on_cpu(op) && (twin.empty() || runs_on_cpu(find_op(twin)));
  return runs ? std::string() : "LibTorch has no kernel of it for CPU tensors";
}

std::vector<Sample> calls_of(const std::string& overload) {
  if (const auto found = by_hand().find(overload); found != by_hand().end()) {
    std::vector<Sample> out = found->second;
    // On the CPU, for which they were written, plain tensors allow them all.
    if (!device().is_cpu()) std::erase_if(out, [](const Sample& sample) { return !succeeds(sample); });
    return out;
  }
  const c10::OperatorHandle op = find_op(overload);
  if (const std::string twin = functional_twin(op.schema()); !twin.empty()) {
    std::vector<Sample> out = as_twin(op, calls_of(twin));
    if (!out.empty()) return out;
  }
  if (unchecked(overload)) return {};
  return made(op);
}

}  // namespace tessera::testing
