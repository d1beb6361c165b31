#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/dtensor/dispatch/call.h"
#include "tessera/ops/rules/rule.h"

namespace tessera::dispatch {

// Describes a result of an operator, as found on global shapes without data.
struct MetaResult {
  rules::TensorInfo info;
  std::vector<int64_t> strides;
  int64_t offset = 0;  // a view: its first element from that of the viewed tensor, in the elements of the result
};

// Returns the results of `call`, lists flattened, as LibTorch's kernel for meta tensors gives them; nullopt if there is
// no such kernel. Throws what the operator throws.
std::optional<std::vector<MetaResult>> run_on_meta(const Call& call);

}  // namespace tessera::dispatch
