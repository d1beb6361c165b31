#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/placement/described.h"
#include "tessera/placement/intervals.h"

namespace tessera {

// How a tensor dimension is cut into parts, one for each coordinate: what stands behind Shard and its kind. Open:
// derive from it, implement part(), and `Shard(dim, std::make_shared<const Mine>(...))` is a placement that
// redistributes to and from every other one, because the intersections of intervals say who sends what to whom.
// Immutable; read from any thread.
//
//   class Halves final : public Partition {   // even elements first, odd ones second
//    public:
//     Halves() : Partition("Halves", "") {}
//     Intervals part(int64_t size, int64_t parts, int64_t index) const override;
//   };
//
// Several mesh dimensions may cut one tensor dimension: each cuts what the one before it left, of which it sees the
// size alone (elements 0 .. size-1 in the order of the tensor), unless parts() takes them together.
class Partition : public Described {
 public:
  // `name` and `parameters` are what the placement's text shows: name(dim) or name(dim,parameters).
  Partition(const std::string& name, const std::string& parameters)
      : Described(parameters.empty() ? name : name + ',' + parameters), name_(name), parameters_(parameters) {}

  const std::string& name() const { return name_; }
  const std::string& parameters() const { return parameters_; }

  // The elements of part `index`, 0 <= index < parts, of a dimension of `size` elements. The parts together hold every
  // element exactly once, which is checked at first use of a layout.
  virtual Intervals part(int64_t size, int64_t parts, int64_t index) const = 0;

  // The number of parts, when it is fixed: then the mesh dimensions that carry this partition for one tensor dimension
  // cut it together, by their combined coordinate (the first varies slowest), and their sizes must multiply to it.
  virtual std::optional<int64_t> parts() const { return std::nullopt; }
  // The size of the dimension, when it is fixed.
  virtual std::optional<int64_t> size() const { return std::nullopt; }
  // Whether the parts are known to hold every element once, so that nobody need check.
  virtual bool exact() const { return false; }

 private:
  const std::string name_;
  const std::string parameters_;
};
using PartitionPtr = std::shared_ptr<const Partition>;

// Returns the part of a dimension of `dim_size` elements that part `index` of `num_parts` holds.
//   dim_size 10 over 4 -> sizes 3, 3, 3, 1
//   dim_size  3 over 4 -> sizes 1, 1, 1, 0
// Empty parts begin at dim_size. Source: torch.chunk, which PyTorch's Shard placement follows.
// Throws std::invalid_argument if dim_size < 0, num_parts < 1 or index is outside [0, num_parts).
Interval chunk_range(int64_t dim_size, int64_t num_parts, int64_t index);

// By chunk_range. "S".
const PartitionPtr& chunks();
// Part i has sizes[i] elements, after those of the parts before it. "RS,3,0,5".
PartitionPtr ragged(const std::vector<int64_t>& sizes);
// Blocks of `block` elements, dealt out in turn; the last block may be short. "BC,4".
//   10 elements, blocks of 2, over 2 -> {0-2, 4-6, 8-10}, {2-4, 6-8}
PartitionPtr block_cyclic(int64_t block);
// Any: part i is parts[i]. "IS,0-2+6-8,2-6".
PartitionPtr interval_lists(const std::vector<Intervals>& parts);

// Throws std::invalid_argument, prefixed with `who`, when `partition` cannot cut `size` elements into `parts`: another
// number of parts or another size is fixed, or its parts leave out an element or hold one twice.
void check_partition(const Partition& partition, int64_t size, int64_t parts, const std::string& who);

}  // namespace tessera
