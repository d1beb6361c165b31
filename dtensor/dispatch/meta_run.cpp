#include "tessera/dtensor/dispatch/meta_run.h"

#include <string_view>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "tessera/dtensor/core/tensor_lists.h"

namespace tessera::dispatch {
namespace {

at::Tensor meta_of(const TensorArg& entry, bool row_major) {
  if (!entry.tensor->defined()) return {};
  const at::Tensor& t = *entry.tensor;
  const at::TensorOptions options = t.options().device(c10::kMeta);
  at::Tensor meta = row_major ? at::empty(t.sizes(), options) : at::empty_strided(t.sizes(), t.strides(), options);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

// Returns the call's arguments, with meta tensors of the global shapes in place of the tensors.
torch::jit::Stack meta_stack(const Call& call) {
  torch::jit::Stack stack(call.args().begin(), call.args().end());
  // LibTorch has no meta kernel for it, and the composite one that runs instead views its input as row-major.
  const bool row_major = call.traits.name == "aten::native_group_norm";
  std::size_t next = 0;
  for (std::size_t i = 0; i < stack.size(); ++i) {
    at::IValue& value = stack[i];
    if (value.isDevice()) value = c10::Device(c10::kMeta);
    if (value.isGenerator()) value = at::IValue();
    if (detail::is_tensor_list(value)) {
      detail::replace_tensors(value,
                              [&](const at::Tensor&, std::size_t) { return meta_of(call.tensors[next++], row_major); });
    } else if (next < call.tensors.size() && call.tensors[next].arg == i) {
      if (call.tensors[next].tensor->defined()) value = meta_of(call.tensors[next], row_major);
      ++next;
    }
  }
  return stack;
}

void append_result(const at::Tensor& t, bool view, std::vector<MetaResult>& out) {
  MetaResult result;
  result.info.defined = t.defined();
  if (t.defined()) {
    result.info = {.sizes = t.sizes().vec(), .dtype = t.scalar_type()};
    result.strides = t.strides().vec();
    if (view) result.offset = t.storage_offset();
  }
  out.push_back(std::move(result));
}

}  // namespace

std::optional<std::vector<MetaResult>> run_on_meta(const Call& call) {
  torch::jit::Stack stack = meta_stack(call);
  // Keeps the arguments alive: for several out= tensors the results are references to them, and LibTorch drops the
  // arguments before it pushes the results.
  const torch::jit::Stack kept = stack;
  try {
    const at::AutoDispatchBelowADInplaceOrView guard;
    call.op.callBoxed(stack);
  } catch (const c10::NotImplementedError&) {
    return std::nullopt;
  } catch (const c10::Error& error) {
    // Composite kernels look up a table of kernels by device, which has none for meta tensors; LibTorch throws no type
    // of its own for that.
    if (!std::string_view(error.what_without_backtrace()).starts_with("DispatchStub: unsupported device type")) throw;
    return std::nullopt;
  }
  std::vector<MetaResult> out;
  for (const at::IValue& value : stack) {
    detail::each_tensor(value, [&](const at::Tensor& t, std::size_t) { append_result(t, call.traits.view, out); });
  }
  return out;
}

}  // namespace tessera::dispatch
