#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/ops/rules/rule.h"

namespace tessera::rules {

// An operator's choice over all mesh dimensions.
struct Choice {
  std::vector<Placements> inputs;   // for each input, the placements to bring it into
  std::vector<Placements> outputs;  // for each output
  std::string_view kernel = {};     // the local kernel of the strategies chosen, if any has one
  double microseconds = 0;          // estimated time to bring the inputs there, halos included
};

// An input that the operator writes and the output that it is, kNoOutput where it is none. Both keep the placements
// that the input has; or, where `moves`, both have the same ones, in which the operator runs aside.
constexpr std::size_t kNoOutput = static_cast<std::size_t>(-1);
struct Written {
  std::size_t input;
  std::size_t output;
  bool moves = false;
};

// A strategy that the search looked at, for explanations.
struct Considered {
  std::size_t mesh_dim;
  Strategy strategy;
  double microseconds;  // to bring the inputs there, halos included
  std::string refused;  // why it cannot be; "" where it can
  bool chosen = false;
};

// For each mesh dimension, outermost first, the strategy that costs least to reach from `current` (one Placements an
// input), given what the mesh dimensions before it chose; ties go to what communicates nothing and changes fewest
// inputs, then to the order in the rule. The work is the sum over mesh dimensions, never the product. Alike on every
// rank. nullopt when `written` leaves a mesh dimension without a strategy. `considered` takes all that was looked at,
// in that order; nothing of it is chosen where every input stays where it is (OpRule::keep).
std::optional<Choice> choose(const OpRule& rule, const std::vector<TensorInfo>& inputs, std::size_t num_outputs,
                             const std::vector<Placements>& current, std::span<const int64_t> mesh_shape,
                             std::span<const Written> written = {}, std::vector<Considered>* considered = nullptr);

}  // namespace tessera::rules
