// Runs every operator of LibTorch on the stand-in for an accelerator: the operator's kernel for the CPU, on the same
// memory, given to the current stream. The host learns the shapes of the results before, as from a GPU's kernels: it
// runs the operator on zeros of the shapes of the arguments.

#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include "tessera/tests/accelerator/late_stream.h"

namespace tessera::testing {
namespace {

using c10::IValue;
using Stack = torch::jit::Stack;

// The host cannot tell the shapes of these results without the values. Their kernels wait on a GPU too.
constexpr std::array<std::string_view, 6> kShapeFollowsValues = {"aten::nonzero",    "aten::masked_select",
                                                                 "aten::_unique2",   "aten::bincount",
                                                                 "aten::unique_dim", "aten::unique_consecutive"};

c10::Device with_index(const std::optional<c10::Device>& given) {
  const c10::Device device = given.value_or(c10::Device(kAccelerator));
  return device.has_index() ? device : c10::impl::VirtualGuardImpl(kAccelerator).getDevice();
}

bool is_late(const at::Tensor& t) { return t.defined() && t.device().type() == kAccelerator; }

at::Tensor on_storage(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  impl->_set_conj(like.is_conj());
  impl->_set_neg(like.is_neg());
  return at::Tensor(std::move(impl));
}

// Returns a tensor of the CPU over the same memory, which it does not own: work that a stream has been given keeps no
// memory, as on a GPU.
at::Tensor same_memory(const at::Tensor& t) {
  if (!is_late(t)) return t;
  void* const start = t.storage().data_ptr().get();
  return on_storage(c10::Storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(),
                                 c10::DataPtr(start, c10::Device(at::kCPU)), nullptr, /*resizable=*/false),
                    c10::DispatchKey::CPU, t);
}

// A stream reads the host's tensors later than the host may change them.
at::Tensor for_later(const at::Tensor& t) {
  if (is_late(t) || !t.defined()) return same_memory(t);
  at::Tensor copy = t.clone();
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

at::Tensor zeros_like(const at::Tensor& t) {
  if (!is_late(t)) return t;
  const auto bytes = static_cast<int64_t>(t.storage().nbytes());
  return on_storage(at::zeros({bytes}, at::kByte).storage(), c10::DispatchKey::CPU, t);
}

// Returns `value` with `change` applied to its tensors, and the CPU in the place of a device.
template <typename Change>
IValue changed(const IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isDevice()) return c10::Device(at::kCPU);
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& each : value.toTensorVector()) out.push_back(change(each));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const auto& each : value.toOptionalTensorVector()) out.push_back(each ? std::optional(change(*each)) : each);
    return out;
  }
  return value;
}

template <typename Change>
Stack changed_all(const Stack& values, const Change& change) {
  Stack out;
  for (const IValue& value : values) out.push_back(changed(value, change));
  return out;
}

// Returns the place of the argument that a result shares memory with, if one is declared.
std::optional<std::size_t> argument_of(const c10::FunctionSchema& schema, const c10::Argument& result) {
  if (result.alias_info() == nullptr) return std::nullopt;
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* const alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->beforeSets() == result.alias_info()->beforeSets()) return i;
  }
  return std::nullopt;
}

c10::Device device_of(const Stack& given) {
  for (const IValue& value : given) {
    if (value.isDevice()) return with_index(value.toDevice());
    if (value.isTensor() && is_late(value.toTensor())) return value.toTensor().device();
    if (!value.isTensorList()) continue;
    for (const at::Tensor& each : value.toTensorVector()) {
      if (is_late(each)) return each.device();
    }
  }
  return with_index(std::nullopt);
}

at::Tensor fresh_like(const at::Tensor& like, c10::Device device) {
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(device));
}

// Writes to `to`, which has the same shape, what a kernel has returned.
void write(const at::Tensor& to, const at::Tensor& result) {
  if (to.sizes() != result.sizes()) throw std::logic_error("a result's shape is not that of the same call on zeros");
  to.copy_(result);
}

void view(const c10::OperatorHandle& op, const Stack& given, std::size_t base, Stack* stack) {
  Stack on_cpu = changed_all(given, same_memory);
  op.callBoxed(&on_cpu);
  const at::Tensor& viewed = given[base].toTensor();
  stack->emplace_back(on_storage(c10::Storage(viewed.storage()), c10::DispatchKey::PrivateUse1, on_cpu[0].toTensor()));
}

// Waits, and calls the operator on the host.
void run_now(const c10::OperatorHandle& op, const Stack& given, Stack* stack) {
  const c10::Device device = device_of(given);
  current_late_stream(device).drain();
  Stack results = changed_all(given, same_memory);
  op.callBoxed(&results);
  const auto& declared = op.schema().returns();
  for (std::size_t i = 0; i < results.size(); ++i) {
    const std::optional<std::size_t> argument = argument_of(op.schema(), declared[i]);
    if (argument) {
      stack->push_back(given[*argument]);
    } else if (results[i].isTensor() && results[i].toTensor().defined()) {
      const at::Tensor out = fresh_like(results[i].toTensor(), device);
      write(same_memory(out), results[i].toTensor());
      stack->emplace_back(out);
    } else {
      stack->push_back(results[i]);
    }
  }
}

bool waits(const c10::FunctionSchema& schema) {
  for (const std::string_view name : kShapeFollowsValues) {
    if (schema.name() == name) return true;
  }
  for (const c10::Argument& result : schema.returns()) {
    if (result.type()->kind() != c10::TypeKind::TensorType) return true;
  }
  return false;
}

// Gives a call to the current stream. `tried` are its results on zeros. Pushes the results, whose values come later.
void give(const c10::OperatorHandle& op, const Stack& given, const Stack& tried, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const c10::Device device = device_of(given);
  std::vector<std::pair<std::size_t, at::Tensor>> fresh;  // the place of a result, and its memory
  for (std::size_t i = 0; i < tried.size(); ++i) {
    const at::Tensor& like = tried[i].toTensor();
    const std::optional<std::size_t> argument = argument_of(schema, schema.returns()[i]);
    if (argument) {
      const at::Tensor& written = given[*argument].toTensor();
      if (written.sizes() != like.sizes()) written.resize_(like.sizes());
      stack->emplace_back(written);
    } else if (!like.defined()) {
      stack->emplace_back(like);
    } else {
      stack->emplace_back(fresh_like(like, device));
      fresh.emplace_back(i, same_memory(stack->back().toTensor()));
    }
  }
  current_late_stream(device).give([op, arguments = changed_all(given, for_later), fresh = std::move(fresh)] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    Stack results = arguments;
    op.callBoxed(&results);
    for (const auto& [place, memory] : fresh) write(memory, results[place].toTensor());
  });
}

void run(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const auto first = stack->end() - static_cast<std::ptrdiff_t>(schema.arguments().size());
  const Stack given(first, stack->end());
  stack->erase(first, stack->end());
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (schema.returns().size() == 1 && !schema.is_mutable()) {
    const std::optional<std::size_t> base = argument_of(schema, schema.returns()[0]);
    if (base) return view(op, given, *base, stack);
  }
  if (waits(schema)) return run_now(op, given, stack);
  Stack tried = changed_all(given, zeros_like);
  try {
    op.callBoxed(&tried);
  } catch (const std::exception&) {
    return run_now(op, given, stack);  // the values say whether it is an error
  }
  give(op, given, tried, stack);
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(with_index(device));
  return at::detail::empty_generic(sizes, c10::GetAllocator(kAccelerator),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(with_index(device));
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(kAccelerator),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!is_late(to)) {
    current_late_stream(from.device()).drain();
    to.copy_(same_memory(from));
  } else {
    current_late_stream(to.device()).give([from = for_later(from), to = same_memory(to)] {
      const at::AutoDispatchBelowADInplaceOrView below;
      to.copy_(from);
    });
  }
  return to;
}

// The stream finds the error, and whoever waits for it next.
void assert_later(const at::Tensor& self, std::string_view text) {
  current_late_stream(self.device()).give([self = for_later(self), text = std::string(text)] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::_assert_async(self, text);
  });
}

// Resizes an output that an operator has not been given in its size. Such a one has no elements to keep.
const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  c10::TensorImpl& impl = *self.unsafeGetTensorImpl();
  const std::size_t bytes = static_cast<std::size_t>(c10::multiply_integers(sizes)) * self.element_size();
  if (self.storage().nbytes() < bytes) {
    if (self.numel() > 0) throw std::logic_error("resize_: the stand-in grows only a tensor without elements");
    self.storage().set_data_ptr_noswap(c10::GetAllocator(kAccelerator)->allocate(bytes));
    self.storage().set_nbytes(bytes);
  }
  impl.set_sizes_contiguous(sizes);
  return self;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_assert_async.msg", &assert_later);
  m.impl("resize_", &resize);
}

}  // namespace tessera::testing
