#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/ops/rules/rule.h"
#include "tessera/placement/planner/cost_model.h"

namespace tessera::rules {

// Holds the placements that were chosen for one operator call, over all mesh dimensions.
struct Choice {
  std::vector<Placements> inputs;   // [input]: the placements to redistribute it to
  std::vector<Placements> outputs;  // [output]
  std::string_view kernel = {};     // the local kernel of the chosen strategies, if any has one
  bool joins = false;               // this kernel communicates where it is one that does
  double microseconds = 0;          // estimated time, the sum of the chosen Considered::microseconds
};

// Names an input that the operator writes, and the output that is the same tensor (kNoOutput if it is no output). Both
// keep the input's placements. With `computed_in_copy` they only need the same placements, since the operator then
// writes a copy.
constexpr std::size_t kNoOutput = static_cast<std::size_t>(-1);
struct Written {
  std::size_t input;
  std::size_t output;
  bool computed_in_copy = false;
};

// Describes a strategy that the search considered, for explain_op.
struct Considered {
  std::size_t mesh_dim;
  Strategy strategy;
  double microseconds;  // to redistribute the inputs and exchange halos, and for what choose() adds
  std::string refused;  // why it is impossible; "" if it is possible
  bool chosen = false;
};

// Chooses a strategy for each mesh dimension, outermost first: the one that is cheapest to reach from `current` (one
// Placements per input), given the choices for the earlier mesh dimensions. Of equally cheap ones it prefers those that
// communicate nothing and change the fewest inputs, then the order in the rule. The work is the sum over mesh
// dimensions, not the product. The result is the same on every rank. Returns nullopt when `written` leaves a mesh
// dimension without a strategy. `considered` receives every strategy that was considered, in that order; none is marked
// as chosen if every input stays as it is (OpRule::outputs_for). `model` has one link per mesh dimension and gives each
// redistribution its time.
//
// Where a strategy communicates pieces, a result that it leaves pending costs its reduce_scatter too, which will run
// later: to gather a convolution's kernels may be cheaper than to cut their channels and reduce the images. A strategy
// that communicates no piece does not have this cost, so that a row-parallel product leaves its terms for later; nor
// has one with a pending input. What a kernel communicates (Strategy::joined) costs one latency, however many
// collectives it runs: it leaves the pieces where later operators expect them.
std::optional<Choice> choose(const OpRule& rule, const std::vector<TensorInfo>& inputs,
                             const std::vector<TensorInfo>& outputs, const std::vector<Placements>& current,
                             std::span<const int64_t> mesh_shape, const CostModel& model,
                             std::span<const Written> written = {}, std::vector<Considered>* considered = nullptr);

}  // namespace tessera::rules
