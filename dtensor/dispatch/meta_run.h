#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/dtensor/dispatch/call.h"
#include "tessera/ops/rules/rule.h"

namespace tessera::dispatch {

// A result of an operator as it is found on global shapes, without data.
struct MetaResult {
  rules::TensorInfo info;
  std::vector<int64_t> strides;
};

// The results of `call`, lists flattened, by LibTorch's kernel for meta tensors; nullopt where there is none. Throws
// what the operator throws.
std::optional<std::vector<MetaResult>> run_on_meta(const Call& call);

}  // namespace tessera::dispatch
