#pragma once

#include <string_view>

namespace tessera::rules {

// Says whether LibTorch gives the results of an operator (of any overload) in row-major order whatever the order of its
// inputs is. Lists those alone that have no meta kernel, which would tell the strides.
bool gives_row_major(std::string_view name);

}  // namespace tessera::rules
