#include "tessera/dtensor/dispatch/local_kernel.h"

#include <map>
#include <stdexcept>
#include <string>

#include <fmt/format.h>

#include "tessera/ops/rules/rule.h"

namespace tessera {
namespace {

// The tables are filled while the program loads, and only read afterwards.
std::map<std::string, LocalKernelEntry, std::less<>>& kernels() {
  static std::map<std::string, LocalKernelEntry, std::less<>> table;
  return table;
}

std::map<std::string, DecompositionEntry, std::less<>>& decompositions() {
  static std::map<std::string, DecompositionEntry, std::less<>> table;
  return table;
}

}  // namespace

bool register_local_kernel(std::string_view name, LocalKernel kernel, LocalKernelTraits traits) {
  if (kernels().emplace(name, LocalKernelEntry{.kernel = kernel, .traits = traits}).second) return true;
  throw std::logic_error(
      fmt::format("two local kernels are called \"{}\"; give yours a name that begins with its namespace", name));
}

LocalKernelEntry find_local_kernel(std::string_view name) {
  const auto it = kernels().find(name);
  if (it != kernels().end()) return it->second;
  throw std::logic_error(fmt::format(
      "a sharding rule names the local kernel \"{}\", which is not there; register_local_kernel it, or, where "
      "the library's own are missing, depend on //ops/kernels",
      name));
}

at::Tensor own_if_copy(const c10::OperatorHandle& op, const at::Tensor& view) {
  return op.schema().name().ends_with("_copy") ? view.clone(at::MemoryFormat::Contiguous) : view;
}

bool register_decomposition(std::string_view op_name, Decomposition decomposition, DecomposedCalls calls) {
  return decompositions().emplace(op_name, DecompositionEntry{decomposition, calls}).second;
}

DecompositionEntry find_decomposition(const std::string& op_name) {
  const std::string own = op_name.rfind("aten::", 0) == 0 ? op_name.substr(6) : op_name;
  for (const std::string& name : {own, rules::rule_key(op_name)}) {
    if (const auto it = decompositions().find(name); it != decompositions().end()) return it->second;
  }
  return {};
}

}  // namespace tessera
