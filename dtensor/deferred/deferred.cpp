#include "tessera/dtensor/deferred/deferred.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <tuple>
#include <vector>

#include <ATen/ops/_has_compatible_shallow_copy_type.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/library.h>

#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/core/tensor_lists.h"
#include "tessera/dtensor/random/draw_guard.h"
#include "tessera/mesh/core/backward_pass.h"

namespace tessera::detail {
namespace {

using torch::jit::Stack;

// Holds the tape of this thread's Recording.
thread_local std::shared_ptr<Tape> recording;

constexpr const char* kNoMemory =
    "this tensor was made under ShardedInit and has no memory yet: fill it by operators (normal_, fill_, copy_), not "
    "by its data pointer; or make it before the guard, or after its scope, e.g. torch::tensor of a std::vector";

// Returns a storage's flag that makes reads of its data pointer throw. LibTorch can set it but not clear it.
bool& throws(c10::StorageImpl& storage);
template <bool c10::StorageImpl::*Flag>
struct Reach {
  friend bool& throws(c10::StorageImpl& storage) { return storage.*Flag; }
};
template struct Reach<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

struct DeferredMeta final : c10::BackendMeta {
  explicit DeferredMeta(std::shared_ptr<Tape> t) : tape(std::move(t)) {}
  c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>& self) const override {
    return self;
  }
  const std::shared_ptr<Tape> tape;
};

// Reaches the protected member that marks a tensor.
struct Access : c10::TensorImpl {
  static void defer(c10::TensorImpl& impl) {
    impl.*(&Access::key_set_) = impl.key_set().add(c10::DispatchKey::DeferredInit);
  }
};

const std::shared_ptr<Tape>& shared_tape(const at::Tensor& deferred) {
  return static_cast<DeferredMeta*>(deferred.unsafeGetTensorImpl()->get_backend_meta())->tape;
}

void mark(const at::Tensor& t, const std::shared_ptr<Tape>& tape) {
  c10::TensorImpl& impl = *t.unsafeGetTensorImpl();
  Access::defer(impl);
  if (impl.get_backend_meta() == nullptr) impl.set_backend_meta(c10::make_intrusive<DeferredMeta>(tape));
  impl.unsafe_storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(kNoMemory);
}

// Calls `see` with every tensor among the arguments.
void each_tensor_of(c10::ArrayRef<at::IValue> args, c10::function_ref<void(const at::Tensor&)> see) {
  for (const at::IValue& value : args) {
    each_tensor(value, [&](const at::Tensor& t, std::size_t) { see(t); });
  }
}

// While a Comparable is alive, LibTorch's kernels can compare the arguments' data pointers, which are null.
class Comparable {
 public:
  explicit Comparable(c10::ArrayRef<at::IValue> args) {
    each_tensor_of(args, [&](const at::Tensor& t) {
      if (!is_deferred(t)) return;
      storages_.push_back(t.unsafeGetTensorImpl()->unsafe_storage());
      throws(*storages_.back().unsafeGetStorageImpl()) = false;
    });
  }
  ~Comparable() {
    for (const c10::Storage& storage : storages_) throws(*storage.unsafeGetStorageImpl()) = true;
  }
  Comparable(const Comparable&) = delete;
  Comparable& operator=(const Comparable&) = delete;

 private:
  std::vector<c10::Storage> storages_;
};

const at::IValue* find(const c10::OperatorHandle& op, c10::ArrayRef<at::IValue> args, const char* name) {
  const auto at = op.schema().argumentIndexWithName(name);
  return at ? &args[static_cast<std::size_t>(*at)] : nullptr;
}

// Says whether the operator writes its argument `i`.
bool writes(const c10::OperatorHandle& op, std::size_t i) {
  const auto* const alias = op.schema().arguments()[i].alias_info();
  return alias != nullptr && alias->isWrite();
}

// Says whether the operator makes a tensor from sizes and options alone, which is to be recorded. The device counts for
// nothing: options of a tensor without values name the meta device.
bool makes(const c10::OperatorHandle& op, c10::ArrayRef<at::IValue> args) {
  const at::IValue* const device = find(op, args, "device");
  if (device == nullptr) return false;
  const at::IValue* const layout = find(op, args, "layout");
  if (layout != nullptr && layout->isInt() && layout->toLayout() != at::kStrided) return false;
  bool any = false;
  each_tensor_of(args, [&](const at::Tensor& t) { any |= t.defined(); });
  return !any;
}

// Changes the arguments to those that the meta device takes.
void to_meta(const c10::OperatorHandle& op, c10::ArrayRef<at::IValue> given, Stack& stack) {
  for (std::size_t i = 0; i < given.size(); ++i) {
    const std::string& name = op.schema().arguments()[i].name();
    at::IValue& value = stack[stack.size() - given.size() + i];
    if (name == "device" || value.isDevice()) value = c10::Device(c10::kMeta);
    if (name == "pin_memory" || value.isGenerator()) value = at::IValue();
  }
}

std::vector<at::Tensor> results_of(const c10::OperatorHandle& op, Stack& stack) {
  std::vector<at::Tensor> out;
  each_tensor_of(torch::jit::last(stack, op.schema().returns().size()), [&](const at::Tensor& t) { out.push_back(t); });
  return out;
}

// Reads a call so that it can be repeated; its results are added when they are known.
Recorded read(const c10::OperatorHandle& op, c10::ArrayRef<at::IValue> args, Tape& tape) {
  Recorded call{.op = op,
                .args = Stack(args.begin(), args.end()),
                .inputs = {},
                .plain = {},
                .results = {},
                .touched = {},
                .draw = {}};
  for (std::size_t i = 0; i < args.size(); ++i) {
    replace_tensors(call.args[i], [&](const at::Tensor& t, std::size_t index) {
      if (!is_deferred(t)) {
        if (t.defined() && !t.is_inference())
          call.plain.push_back({.tensor = t, .version = static_cast<uint32_t>(t._version())});
        return t;
      }
      call.inputs.push_back({.arg = i, .index = index, .elements = Elements(t)});
      if (writes(op, i)) call.touched.push_back(call.inputs.back().elements.memory());
      return at::Tensor();
    });
  }
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return call;
  std::optional<at::Generator> user;
  for (at::IValue& value : call.args) {
    if (!value.isGenerator()) continue;
    user = value.toGenerator();
    value = at::IValue();
  }
  call.draw = next_draw(*tape.world, user);
  return call;
}

bool records(const c10::FunctionSchema& schema) {
  if (schema.is_mutable()) return true;
  return std::ranges::any_of(schema.returns(), [](const c10::Argument& result) {
    return result.type()->kind() == c10::TypeKind::TensorType || result.type()->kind() == c10::TypeKind::ListType;
  });
}

// Runs an operator that returns no tensor. It throws where it needs values.
void ask(const c10::OperatorHandle& op, Stack& stack) {
  try {
    op.callBoxed(stack);
  } catch (const c10::Error& error) {
    throw std::invalid_argument(
        fmt::format("{}: a tensor that was made under ShardedInit has no values yet, and one is asked for ({}); {}",
                    op.schema().name(), error.what_without_backtrace(), deferred_way_out()));
  }
}

// Throws for a DTensor among the arguments: the operator would have to compute now, and has no values.
void refuse_values(const c10::OperatorHandle& op, c10::ArrayRef<at::IValue> args) {
  each_tensor_of(args, [&](const at::Tensor& t) {
    if (!is_dtensor(t)) return;
    throw std::invalid_argument(fmt::format(
        "{}: a DTensor, {}, is used with a tensor that was made under ShardedInit and has no values yet; {}",
        op.schema().name(), to_string(*meta(t).spec), deferred_way_out()));
  });
}

// A tensor without values, and one of its sizes that stands for it.
struct StandIn {
  at::Tensor deferred;
  at::Tensor filled;
};

[[noreturn]] void refuse(const c10::OperatorHandle& op, const std::string& why) {
  throw std::invalid_argument(fmt::format("{} under ShardedInit: {}; {}", op.schema().name(), why, deferred_way_out()));
}

// Says whether the sizes of results depend on values. LibTorch has tags for most of these operators.
bool sizes_depend_on_values(const c10::OperatorHandle& op) {
  static const std::set<std::string, std::less<>> untagged = {"aten::_unique", "aten::nonzero_numpy",
                                                              "aten::repeat_interleave.Tensor",
                                                              "aten::repeat_interleave.self_Tensor", "aten::where"};
  const c10::OperatorName& name = op.operator_name();
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output) ||
         untagged.contains(name.overload_name.empty() ? name.name : name.name + "." + name.overload_name);
}

void refuse_sparse(const c10::OperatorHandle& op, const at::Tensor& result) {
  if (result.layout() != at::kStrided) refuse(op, "it makes a sparse tensor, and only dense ones are cut over ranks");
}

// Returns the tensor without values that has the sizes of `result`: the argument that was written, or a new one.
at::Tensor on_meta(const c10::OperatorHandle& op, const at::Tensor& result, const std::vector<StandIn>& inputs) {
  if (!result.defined()) return result;
  refuse_sparse(op, result);
  for (const StandIn& each : inputs) {
    if (!result.is_alias_of(each.filled)) continue;
    if (!result.is_same(each.filled)) refuse(op, "which part its result views depends on values");
    if (each.deferred.sizes() != result.sizes()) each.deferred.resize_(result.sizes());
    return each.deferred;
  }
  return at::empty_strided(result.sizes(), result.strides(), result.options().device(c10::kMeta));
}

// Runs an operator that has no kernel for meta tensors on real memory filled with `value`, and returns its results
// without their values. `args` are those of the call on meta tensors.
Stack call_on_memory(const c10::OperatorHandle& op, const Recorded& call, Stack args, int64_t value) {
  std::vector<StandIn> inputs;
  Stack results = call.args;
  for (std::size_t i = 0; i < args.size(); ++i) {
    if (results[i].isDevice()) results[i] = c10::Device(c10::kCPU);
    std::map<std::size_t, at::Tensor> here;
    replace_tensors(args[i], [&](const at::Tensor& t, std::size_t index) { return here[index] = t; });
    replace_tensors(results[i], [&](const at::Tensor& t, std::size_t index) {
      const at::Tensor given = here[index];
      if (!is_deferred(given)) {
        if (writes(op, i) && given.defined())
          refuse(op, "a tensor with values would be written from one that has none");
        return t;
      }
      const at::Tensor filled =
          at::empty_strided(given.sizes(), given.strides(), given.options().device(c10::kCPU)).fill_(value);
      return inputs.emplace_back(StandIn{.deferred = given, .filled = filled}).filled;
    });
  }
  {
    std::optional<DrawGuard> draw;  // so that the caller's generator stays as it is
    if (call.draw) draw.emplace(c10::kCPU, *call.draw);
    op.callBoxed(results);
  }
  for (at::IValue& result : results) {
    replace_tensors(result, [&](const at::Tensor& t, std::size_t) { return on_meta(op, t, inputs); });
  }
  return results;
}

// Does so with zeros, or ones for operators that refuse zeros.
Stack call_on_memory(const c10::OperatorHandle& op, const Recorded& call, const Stack& args) {
  try {
    return call_on_memory(op, call, args, 0);
  } catch (const c10::Error&) {
    try {
      return call_on_memory(op, call, args, 1);
    } catch (const c10::Error& error) {
      refuse(op, fmt::format("it was run on zeros and on ones for the sizes of its result, and refuses both ({})",
                             error.what_without_backtrace()));
    }
  }
}

// Returns the arguments with tensors without values in the place of those that have some and are only read: most
// operators want all tensors on one device.
Stack all_on_meta(const c10::OperatorHandle& op, Stack args) {
  const std::size_t first = args.size() - op.schema().arguments().size();
  for (std::size_t i = 0; i < op.schema().arguments().size(); ++i) {
    if (writes(op, i)) continue;
    replace_tensors(args[first + i], [&](const at::Tensor& t, std::size_t) {
      if (!t.defined() || is_deferred(t) || t.dim() == 0 || t.layout() != at::kStrided) return t;
      return at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kMeta));
    });
  }
  return args;
}

// Runs the operator on the meta device, for the sizes of its results.
void call_on_meta(const c10::OperatorHandle& op, const Recorded& call, Stack& stack) {
  const Stack given = stack;
  const auto args = given.end() - static_cast<std::ptrdiff_t>(call.args.size());
  try {
    try {
      op.callBoxed(stack);
    } catch (const c10::NotImplementedError&) {
      throw;
    } catch (const c10::Error&) {
      stack = all_on_meta(op, given);
      op.callBoxed(stack);
    }
  } catch (const c10::NotImplementedError&) {
    if (sizes_depend_on_values(op)) {
      refuse(op, "the sizes of its result depend on values, and a tensor that was made under the guard has none yet");
    }
    const Stack results = call_on_memory(op, call, Stack(args, given.end()));
    stack.assign(given.begin(), args);
    stack.insert(stack.end(), results.begin(), results.end());
  }
}

void record(const c10::OperatorHandle& op, const std::shared_ptr<Tape>& tape, Stack& stack) {
  const c10::ArrayRef<at::IValue> args = torch::jit::last(stack, op.schema().arguments().size());
  Recorded call = read(op, args, *tape);
  to_meta(op, args, stack);
  call_on_meta(op, call, stack);
  for (const at::Tensor& t : results_of(op, stack)) {
    if (!t.defined()) {
      call.results.emplace_back();
      continue;
    }
    if (!t.is_meta()) {
      refuse(op, "it returns a tensor with values from one that has none");
    }
    refuse_sparse(op, t);
    mark(t, tape);
    call.results.emplace_back(t);
    call.touched.push_back(call.results.back()->memory());
  }
  tape->calls.push_back(std::move(call));
}

void defer(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  const NotDeferred below;
  const c10::ArrayRef<at::IValue> args = torch::jit::last(*stack, op.schema().arguments().size());
  at::Tensor deferred;
  each_tensor_of(args, [&](const at::Tensor& t) {
    if (!is_deferred(t)) return;
    if (deferred.defined() && shared_tape(t) != shared_tape(deferred)) {
      throw std::invalid_argument(fmt::format(
          "{}: two tensors without values yet, made under two ShardedInit guards, and each guard records on its own; "
          "make both under one",
          op.schema().name()));
    }
    deferred = t;
  });
  // In backward, LibTorch's formulas make zeros, which are not recorded.
  if (!deferred.defined() && (recording == nullptr || in_backward() || !makes(op, args))) return op.callBoxed(*stack);
  const Comparable pointers(args);
  if (!records(op.schema())) return ask(op, *stack);
  // A module may hold the model of its layers outside its children, as LibTorch's TransformerEncoder does, and clones
  // it before it replaces the clone's values.
  static const c10::OperatorName clone("aten::clone", "");
  if (recording == nullptr && op.operator_name() != clone) refuse_deferred(op.schema().name(), deferred);
  refuse_values(op, args);
  record(op, deferred.defined() ? shared_tape(deferred) : recording, *stack);
}

// LibTorch asks this before self.set_data(from), as a module's clone() and to() do.
bool may_take_over(const at::Tensor& self, const at::Tensor& from) {
  if (is_deferred(from)) return !is_dtensor(self);
  if (is_deferred(self)) return is_dtensor(from);
  const NotDeferred below;
  return at::_has_compatible_shallow_copy_type(self, from);
}

TORCH_LIBRARY_IMPL(aten, DeferredInit, m) { m.impl("_has_compatible_shallow_copy_type", may_take_over); }
TORCH_LIBRARY_IMPL(_, DeferredInit, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&defer>()); }

}  // namespace

Elements::Elements(const at::Tensor& t)
    : storage(t.unsafeGetTensorImpl()->unsafe_storage()),
      offset(t.storage_offset()),
      sizes(t.sizes().vec()),
      strides(t.strides().vec()),
      dtype(t.scalar_type()),
      conjugate(t.is_conj()),
      negative(t.is_neg()) {}

int64_t Elements::numel() const { return c10::multiply_integers(sizes); }

bool operator<(const Elements& a, const Elements& b) {
  const auto all = [](const Elements& e) { return std::tuple(e.memory(), e.offset, e.dtype, e.conjugate, e.negative); };
  return std::tie(a.sizes, a.strides) != std::tie(b.sizes, b.strides)
             ? std::tie(a.sizes, a.strides) < std::tie(b.sizes, b.strides)
             : all(a) < all(b);
}

const Tape& tape_of(const at::Tensor& deferred) { return *shared_tape(deferred); }

Recording::Recording(std::shared_ptr<World> world) : previous_(recording), include_(c10::DispatchKey::DeferredInit) {
  if (recording == nullptr) recording = std::make_shared<Tape>(Tape{.world = std::move(world), .calls = {}});
}
Recording::~Recording() { recording = std::move(previous_); }

}  // namespace tessera::detail
