#pragma once

#include <cstdint>
#include <vector>

#include "tessera/dtensor/dispatch/call.h"
#include "tessera/ops/rules/result_order.h"
#include "tessera/ops/rules/rule.h"

namespace tessera::dispatch {

// Returns the strides of a result of `call`, whose results lie in `order`. `told` are those of LibTorch's meta kernel;
// nullptr where there is none.
std::vector<int64_t> result_strides(const Call& call, rules::ResultOrder order, const rules::TensorInfo& result,
                                    const std::vector<int64_t>* told);

}  // namespace tessera::dispatch
