#pragma once

#include "tessera/tests/ops/rules/sample.h"

namespace tessera::testing {

// These are handwritten calls, on small shapes that do not divide evenly.
std::vector<Sample> view_samples();
std::vector<Sample> join_samples();
std::vector<Sample> indexing_samples();
std::vector<Sample> norm_samples();
std::vector<Sample> reduction_samples();
std::vector<Sample> matmul_samples();
std::vector<Sample> nn_samples();
std::vector<Sample> convolution_samples();
std::vector<Sample> pooling_samples();
std::vector<Sample> factory_samples();
std::vector<Sample> pointwise_samples();
std::vector<Sample> batched_samples();
std::vector<Sample> random_samples();

// Returns calls of every overload of an operator by its base name, with arguments made from the schema. Overloads that
// refuse those arguments are left out.
std::vector<Sample> made_samples(const std::string& base_name);

// Describes an operator that resamples images: its name, how many dimensions it resamples, and whether it takes
// align_corners.
struct ResamplingKind {
  std::string name;
  std::size_t dims;
  bool corners;
};
const std::vector<ResamplingKind>& resampling_kinds();

}  // namespace tessera::testing
