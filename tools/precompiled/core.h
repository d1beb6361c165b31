// This header is compiled once for `precompiled = "core"` of tessera_library. It has what sources include that compute
// with placements and sizes, and that pass tensors on.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
