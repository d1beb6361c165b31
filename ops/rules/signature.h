#pragma once

#include <optional>
#include <string_view>

#include "tessera/ops/rules/rule.h"

namespace tessera::rules {

// An operator's tensors in factors, written as text: "*--, *-k -> *-k". One word a tensor, inputs in schema order
// (lists are not for this), results after the arrow, nothing for one of no dimensions. A letter is a factor (lower
// case), '-' a dimension that must stay whole, '*' in front any number of leading dimensions, which broadcast from the
// right and are factors each; '~' any number of whole ones. What tensor dimensions do not fit the text: nullopt. A
// result that has fewer leading dimensions than the inputs does not fit either.
struct Signature {
  std::vector<Labels> inputs;
  std::vector<Labels> outputs;
};
std::optional<Signature> read_signature(std::string_view text, const OpCall& call);

// What passes through an operator by its first input pending alone.
enum class Passes : uint8_t { kNothing, kLinear, kMovement };

struct SignatureEntry {
  std::string_view name;
  std::string_view text;  // several, parted by '|': the first that fits
  Passes passes = Passes::kNothing;
  std::string_view size_arg = {};  // the argument that holds the sizes of the first result, all of them
  // The results where LibTorch does not tell them without running the operator, or tells others.
  std::vector<TensorInfo> (*results)(const OpCall& call) = nullptr;
};

// The rule; without strategies where no text fits, or the results' shapes are not known.
OpRule rule_of(const SignatureEntry& entry, const OpCall& call);

}  // namespace tessera::rules
