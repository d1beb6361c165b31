#pragma once

#include <cstdint>
#include <string_view>

namespace tessera::rules {

// Is the order of dimensions in memory in which LibTorch gives the results of an operator.
enum class ResultOrder : uint8_t {
  kAsMeta,         // as its meta kernel says, or where it has none, that of the first input of the result's sizes
  kAsMetaOfWhole,  // the same; but a piece may seem to have another memory format, by which the operator decides
  kRowMajor,       // row-major
  kImage,          // channels-last where the first input is (in backward operators the second), else row-major
  kConvolution,    // channels-last where an input is, else row-major; float64 on a GPU or in five dimensions: row-major
};

// Returns the order for an operator (of any overload) that has a rule, on the CPU or on a GPU.
ResultOrder result_order(std::string_view name, bool on_cpu);

}  // namespace tessera::rules
