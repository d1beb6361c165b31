#include "tessera/ops/kernels/arguments.h"

#include <algorithm>

#include "tessera/dtensor/core/spec.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/core/tensor_lists.h"
#include "tessera/dtensor/dtensor.h"

namespace tessera {

using torch::jit::Stack;

Stack take_args(const c10::OperatorHandle& op, const Stack& stack) {
  const auto n = static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  return {stack.end() - n, stack.end()};
}

int argument(const c10::OperatorHandle& op, const char* name) {
  const auto at = op.schema().argumentIndexWithName(name);
  return at ? *at : -1;
}

void give(const c10::OperatorHandle& op, Stack& stack, Stack results) {
  stack.resize(stack.size() - op.schema().arguments().size());
  for (at::IValue& value : results) stack.push_back(std::move(value));
}

void give(const c10::OperatorHandle& op, Stack& stack, at::IValue result) { give(op, stack, Stack{std::move(result)}); }

bool writes(const c10::OperatorHandle& op) {
  return std::any_of(op.schema().arguments().begin(), op.schema().arguments().end(),
                     [](const c10::Argument& a) { return a.alias_info() != nullptr && a.alias_info()->isWrite(); });
}

bool spread(const at::IValue& value) {
  bool found = false;
  detail::each_tensor(value, [&](const at::Tensor& t, std::size_t) {
    if (!t.defined() || !detail::is_dtensor(t)) return;
    const Spec& spec = *detail::meta(t).spec;
    found |= spec.sharded || spec.partial;
  });
  return found;
}

bool any_spread(const Stack& args) {
  return std::any_of(args.begin(), args.end(), [](const at::IValue& value) { return spread(value); });
}

std::vector<int64_t> read_numbers(const at::Tensor& t) {
  const at::Tensor here = (is_dtensor(t) ? full_tensor(t) : t).to(at::kCPU, at::kLong).contiguous();
  const auto* const data = here.const_data_ptr<int64_t>();
  return {data, data + here.numel()};
}

}  // namespace tessera
