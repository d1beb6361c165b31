#pragma once

#include <optional>
#include <string_view>

#include "tessera/ops/rules/rule.h"

namespace tessera::rules {

// Gives the factors of an operator's tensors, written as text, e.g. "*--, *-k -> *-k". There is one word per tensor,
// inputs in schema order (lists are not supported) and results after the arrow; the word of a tensor of no dimensions
// is empty. A lower-case letter is a factor, and '-' is a dimension that must not be cut. A leading '*' stands for any
// number of leading dimensions, each of which is a factor, and which broadcast from the right; '~' stands for any
// number of dimensions that must not be cut. Returns nullopt if the tensors' dimensions do not fit the text, or if a
// result has fewer leading dimensions than the inputs.
struct Signature {
  std::vector<Labels> inputs;
  std::vector<Labels> outputs;
};
std::optional<Signature> read_signature(std::string_view text, const OpCall& call);

// Says by which reductions the first input alone may be pending, so that the results are pending too: by none, by
// linear ones, or by all (the operator only moves elements).
enum class Passes : uint8_t { kNothing, kLinear, kMovement };

struct SignatureEntry {
  std::string_view name;
  std::string_view text;  // several texts are separated by '|'; the first that fits is used
  Passes passes = Passes::kNothing;
  std::string_view size_arg = {};  // the argument that holds all sizes of the first result
  // Computes the results where LibTorch cannot tell them without running the operator, or tells wrong ones.
  std::vector<TensorInfo> (*results)(const OpCall& call) = nullptr;
};

// Returns the rule. It has no strategies if no text fits or if the results' shapes are not known.
OpRule rule_of(const SignatureEntry& entry, const OpCall& call);

}  // namespace tessera::rules
