#include "tessera/ops/rules/integer_range.h"

#include <limits>
#include <stdexcept>
#include <type_traits>

#include <ATen/Dispatch.h>
#include <fmt/format.h>

namespace tessera::rules {
namespace {

struct Bounds {
  int64_t lowest;
  int64_t highest;
};

template <class T>
constexpr Bounds bounds() {
  using Limits = std::numeric_limits<T>;
  if constexpr (std::is_same_v<T, bool>) return {0, 1};
  if constexpr (std::is_integral_v<T>)
    return {static_cast<int64_t>(Limits::min()), static_cast<int64_t>(Limits::max())};
  return {-(int64_t{1} << Limits::digits), int64_t{1} << Limits::digits};
}

Bounds bounds_of(at::ScalarType dtype) {
  return AT_DISPATCH_ALL_TYPES_AND3(at::kBool, at::kHalf, at::kBFloat16, dtype, "integer_range",
                                    [] { return bounds<scalar_t>(); });
}

// Returns the argument `name`; nullopt if the operator has none or if it is None.
std::optional<int64_t> argument(const c10::FunctionSchema& schema, std::span<const c10::IValue> args,
                                const char* name) {
  const auto at = schema.argumentIndexWithName(name);
  if (!at || args[static_cast<std::size_t>(*at)].isNone()) return std::nullopt;
  return args[static_cast<std::size_t>(*at)].toInt();
}

}  // namespace

IntegerRange integer_range(std::string_view who, int64_t first, std::optional<int64_t> end, at::ScalarType dtype) {
  const Bounds type = bounds_of(dtype);
  if (end && first >= *end) {
    throw std::invalid_argument(
        fmt::format("{}: no number is at least {} and below {}; give a first number below the end", who, first, *end));
  }
  const int64_t last = end ? *end - 1 : type.highest;
  if (first < type.lowest || first > type.highest || last > type.highest) {
    throw std::invalid_argument(fmt::format("{}: {} has the whole numbers from {} to {}, not all from {} to {}", who,
                                            c10::toString(dtype), type.lowest, type.highest, first, last));
  }
  return {.first = first, .count = static_cast<uint64_t>(last) - static_cast<uint64_t>(first) + 1};
}

IntegerRange integer_range(const c10::FunctionSchema& schema, std::span<const c10::IValue> args, at::ScalarType dtype) {
  const int64_t first = argument(schema, args, "from").value_or(argument(schema, args, "low").value_or(0));
  std::optional<int64_t> end = argument(schema, args, "to");
  if (!end) end = argument(schema, args, "high");
  return integer_range(schema.name(), first, end, dtype);
}

}  // namespace tessera::rules
