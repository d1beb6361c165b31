#pragma once

#include "tessera/bench/plan_pairs.h"

namespace tessera::bench {

// Plans of one mesh, tensor and model beside the cheapest that trying everything finds.
struct Quality {
  std::string mesh, shape, model;
  int64_t pairs = 0;
  int64_t off = 0;          // dearer or cheaper than the optimum, unsound, or lower_bound() is not what counting gives
  int64_t above_limit = 0;  // of live bytes; the optimum is above it in as many
  Ratios to_optimum;
  Ratios peak_to_optimum;  // live bytes
  Ratios to_bound;         // bytes to the lower bound, of pairs without a pending reduction
  std::string first_off;
};

// One for each model. Shows on stderr up to `examples` plans that are off, for each.
std::vector<Quality> measure_quality(const Mesh& mesh, const Sizes& shape, std::size_t most_pairs, int examples);

}  // namespace tessera::bench
