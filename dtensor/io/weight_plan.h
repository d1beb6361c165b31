#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/io/safetensors_file.h"
#include "tessera/dtensor/io/weight_rules.h"

namespace tessera {

// Says where the elements of one box of a described tensor lie in a tensor of a file.
//
// Invariants:
//   - loops[d] are the loops over dimension d of the box, the outermost first; their sizes multiply to box.sizes[d].
//   - All loops together, sorted by stride, are nested (see runs_of_loops). So no element of the file is used twice.
struct WeightBlock {
  std::string file_name;
  TensorBox box;
  int64_t offset = 0;  // of the box's first element, in elements of the file's tensor
  std::vector<std::vector<Loop>> loops;

  friend bool operator==(const WeightBlock&, const WeightBlock&) = default;
};

// Describes a tensor by blocks, whose boxes tile it.
struct WeightPlan {
  std::vector<int64_t> shape;
  std::vector<WeightBlock> blocks;

  friend bool operator==(const WeightPlan&, const WeightPlan&) = default;
};

// Carries out the steps of `source`, whose names have no wildcards, on shapes alone. Throws std::invalid_argument when
// a step does not fit, with the shape that it meets.
using ShapeOf = std::function<const std::vector<int64_t>&(const std::string& file_name)>;
WeightPlan plan_weight(const WeightSource& source, const ShapeOf& shape_of);

// Returns the plan of a part of the described tensor.
WeightPlan part_of_plan(const WeightPlan& plan, const TensorBox& box);

// Returns the runs of the file's tensor that hold the block's elements.
ElementRuns runs_of(const WeightBlock& block);
// Returns the elements of runs_of(), which `packed` has in the file's order, as a tensor of box.sizes; it may share
// storage with `packed`.
at::Tensor arranged(const WeightBlock& block, const at::Tensor& packed);
// Returns the loops over the elements of the file's tensor that the block takes, in the file's order and as few as
// possible. Blocks of one offset that take the same elements have the same ones, however they arrange these.
std::vector<Loop> loops_in_file(const WeightBlock& block);
// Says whether the file has the block's elements in the order of the box, so that arranged() shares storage.
bool in_file_order(const WeightBlock& block);

}  // namespace tessera
