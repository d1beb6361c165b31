#pragma once

#include "tessera/bench/plan_pairs.h"

namespace tessera::bench {

// Compares plans of one mesh, tensor and cost model with the cheapest ones, which an exhaustive search finds.
struct Quality {
  std::string mesh, shape, model;
  int64_t pairs = 0;
  int64_t off = 0;          // plans that cost more or less than the optimum, are unsound, or have a wrong lower_bound()
  int64_t above_limit = 0;  // plans above the limit of live bytes
  Ratios to_optimum;
  Ratios peak_to_optimum;  // peak live bytes
  Ratios to_bound;         // bytes over the lower bound, for pairs without a pending reduction
  std::string first_off;
};

// Returns one Quality per model, and prints up to `examples` plans that are off per model to stderr.
std::vector<Quality> measure_quality(const Mesh& mesh, const Sizes& shape, std::size_t most_pairs, int examples);

}  // namespace tessera::bench
