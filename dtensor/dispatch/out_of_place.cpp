#include "tessera/dtensor/dispatch/out_of_place.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>

#include "tessera/dtensor/core/tensor_lists.h"
#include "tessera/dtensor/dispatch/call.h"

namespace tessera::dispatch {
namespace {

using torch::jit::Stack;

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}
bool is_out(const c10::Argument& argument) { return argument.kwarg_only() && is_written(argument); }

// Lists the overloads that write nothing, by the operator's name.
using Functional = std::multimap<std::string, c10::OperatorHandle>;

Functional find_functional() {
  Functional out;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (op && std::none_of(op->schema().arguments().begin(), op->schema().arguments().end(), is_written)) {
      out.emplace(name.name, *op);
    }
  }
  return out;
}

bool takes(const c10::FunctionSchema& schema, const std::vector<c10::TypePtr>& types) {
  const auto& arguments = schema.arguments();
  return std::equal(arguments.begin(), arguments.end(), types.begin(), types.end(),
                    [](const c10::Argument& a, const c10::TypePtr& type) { return *a.type() == *type; });
}

std::vector<at::Tensor> tensors_of(const Stack& values) {
  std::vector<at::Tensor> out;
  for (const at::IValue& value : values) {
    detail::each_tensor(value, [&](const at::Tensor& t, std::size_t) { out.push_back(t); });
  }
  return out;
}

void refuse_gradients(const std::string& name, const Stack& args) {
  if (!c10::GradMode::is_enabled()) return;
  for (const at::Tensor& t : tensors_of(args)) {
    if (!t.defined() || !t.requires_grad()) continue;
    throw std::invalid_argument(
        fmt::format("{}: out= has no derivative, and an argument requires a gradient; leave out= out", name));
  }
}

// Throws, before any is written, if a result does not fit the tensor that it would be written to.
void check_fit(const std::string& name, const std::vector<at::Tensor>& results,
               const std::vector<at::Tensor>& written) {
  for (std::size_t k = 0; k < written.size() && k < results.size(); ++k) {
    if (written[k].sizes() != results[k].sizes()) refuse_sizes(name, results[k].sizes(), written[k].sizes());
    const at::ScalarType from = results[k].scalar_type(), to = written[k].scalar_type();
    if (c10::canCast(from, to)) continue;
    throw std::invalid_argument(
        fmt::format("{}: result type {} can't be cast to the desired output type {}; give an out= tensor of {}", name,
                    c10::toString(from), c10::toString(to), c10::toString(from)));
  }
}

}  // namespace

std::optional<c10::OperatorHandle> without_out(const c10::OperatorHandle& op) {
  static const Functional functional = find_functional();  // of the operators registered while the program loads
  const auto& arguments = op.schema().arguments();
  if (std::none_of(arguments.begin(), arguments.end(), is_out)) return std::nullopt;
  std::vector<c10::TypePtr> types;
  for (const c10::Argument& a : arguments) {
    if (!is_out(a)) types.push_back(a.type());
  }
  const auto [first, last] = functional.equal_range(op.schema().name());
  const auto found = std::find_if(first, last, [&](const auto& entry) { return takes(entry.second.schema(), types); });
  return found == last ? std::nullopt : std::make_optional(found->second);
}

void OutOfPlace::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const Stack args(stack->end() - static_cast<std::ptrdiff_t>(arguments.size()), stack->end());
  refuse_gradients(op.schema().name(), args);
  Stack given;
  Stack outs;
  for (std::size_t i = 0; i < args.size(); ++i) (is_out(arguments[i]) ? outs : given).push_back(args[i]);
  {
    // Autocast leaves forms with out= alone.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    functional_.callBoxed(given);
  }
  const std::vector<at::Tensor> results = tensors_of(given), written = tensors_of(outs);
  check_fit(op.schema().name(), results, written);
  for (std::size_t k = 0; k < written.size() && k < results.size(); ++k) written[k].copy_(results[k]);
  stack->resize(stack->size() - arguments.size());
  for (at::IValue& value : outs) stack->push_back(std::move(value));
}

}  // namespace tessera::dispatch
