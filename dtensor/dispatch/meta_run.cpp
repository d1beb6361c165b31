#include "tessera/dtensor/dispatch/meta_run.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>

namespace tessera::dispatch {
namespace {

at::Tensor meta_of(const TensorArg& entry) {
  if (!entry.tensor->defined()) return {};
  const at::Tensor& t = *entry.tensor;
  at::Tensor meta = at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kMeta));
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

// The call's arguments with meta tensors of the global shapes in the tensors' places.
torch::jit::Stack meta_stack(const Call& call) {
  torch::jit::Stack stack(call.args().begin(), call.args().end());
  std::size_t next = 0;
  for (std::size_t i = 0; i < stack.size(); ++i) {
    at::IValue& value = stack[i];
    if (value.isDevice()) value = c10::Device(c10::kMeta);
    if (value.isGenerator()) value = at::IValue();
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (; next < call.tensors.size() && call.tensors[next].arg == i; ++next) list.push_back(meta_of(call.tensors[next]));
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (; next < call.tensors.size() && call.tensors[next].arg == i; ++next) {
        list.push_back(call.tensors[next].tensor->defined() ? std::make_optional(meta_of(call.tensors[next]))
                                                            : std::nullopt);
      }
      value = std::move(list);
    } else if (next < call.tensors.size() && call.tensors[next].arg == i) {
      if (call.tensors[next].tensor->defined()) value = meta_of(call.tensors[next]);
      ++next;
    }
  }
  return stack;
}

void append_result(const at::Tensor& t, std::vector<MetaResult>& out) {
  MetaResult result;
  result.info.defined = t.defined();
  if (t.defined()) {
    result.info = {.sizes = t.sizes().vec(), .dtype = t.scalar_type()};
    result.strides = t.strides().vec();
  }
  out.push_back(std::move(result));
}

}  // namespace

std::optional<std::vector<MetaResult>> run_on_meta(const Call& call) {
  torch::jit::Stack stack = meta_stack(call);
  // LibTorch drops the arguments before it takes the results, which for several out= tensors are references to them.
  const torch::jit::Stack kept = stack;
  try {
    const at::AutoDispatchBelowADInplaceOrView guard;
    call.op.callBoxed(stack);
  } catch (const c10::NotImplementedError&) {
    return std::nullopt;
  }
  std::vector<MetaResult> out;
  for (const at::IValue& value : stack) {
    if (value.isTensor()) append_result(value.toTensor(), out);
    if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorVector()) append_result(t, out);
    }
  }
  return out;
}

}  // namespace tessera::dispatch
