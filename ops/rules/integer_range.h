#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>

namespace tessera::rules {

// Describes the `count` integers first, first + 1, ... A count of 0 stands for all 2^64.
struct IntegerRange {
  int64_t first = 0;
  uint64_t count = 0;
};

// Returns the range of the numbers of `dtype` from `first` to below `end`. Without an end, the last number is the
// largest of the dtype; for a floating dtype, 2^digits, up to which it has every integer. Throws std::invalid_argument,
// prefixed with `who`, when the range is empty or the dtype does not have all of its numbers, and
// c10::NotImplementedError on a dtype of which no integers are drawn, such as a complex one.
IntegerRange integer_range(std::string_view who, int64_t first, std::optional<int64_t> end, at::ScalarType dtype);
// Returns the range from which a call of random_, random_.from, random_.to or randint_like draws.
IntegerRange integer_range(const c10::FunctionSchema& schema, std::span<const c10::IValue> args, at::ScalarType dtype);

}  // namespace tessera::rules
