#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/placement/described.h"
#include "tessera/placement/intervals.h"

namespace tessera {

// Says how a tensor dimension is cut into parts, one per coordinate of a mesh dimension. Shard, RaggedShard,
// BlockCyclic and IntervalShard are placements over a Partition. To add one, derive from this class and implement
// part(); then `Shard(dim, std::make_shared<const Mine>(...))` is a placement that can be redistributed to and from
// every other placement, since the intersections of intervals determine which rank sends what to which rank. Objects
// are immutable and are read from any thread.
//
//   class Halves final : public Partition {   // even elements first, odd ones second
//    public:
//     Halves() : Partition("Halves", "") {}
//     Intervals part(int64_t size, int64_t parts, int64_t index) const override;
//   };
//
// Several mesh dimensions may cut one tensor dimension. Each then cuts the elements that the one before it left,
// numbered 0 .. size-1 in the order of the tensor, unless parts() makes them cut together.
class Partition : public Described {
 public:
  // `name` and `parameters` appear in the placement's text: name(dim) or name(dim,parameters).
  Partition(const std::string& name, const std::string& parameters)
      : Described(parameters.empty() ? name : name + ',' + parameters), name_(name), parameters_(parameters) {}

  const std::string& name() const { return name_; }
  const std::string& parameters() const { return parameters_; }

  // Returns the elements of part `index`, 0 <= index < parts, of a dimension of `size` elements. The parts together
  // must hold every element exactly once; this is checked when a layout is first used. It must cut every size, also 0
  // and 1, unless size() returns the one that it cuts. Where it throws for a size, layouts with that size are refused
  // by its exception, and no plan passes through one.
  virtual Intervals part(int64_t size, int64_t parts, int64_t index) const = 0;

  // Returns the number of parts if it is fixed. The mesh dimensions that have this partition for one tensor dimension
  // then cut it together, by their combined coordinate (the first varies slowest), and the product of their sizes must
  // be this number.
  virtual std::optional<int64_t> parts() const { return std::nullopt; }
  // Returns the size of the dimension if it is fixed.
  virtual std::optional<int64_t> size() const { return std::nullopt; }
  // Returns whether the parts are known to hold every element exactly once, so that the check is skipped. part() must
  // then throw for no size that size() allows.
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

// Cuts by chunk_range. Its text is "S".
const PartitionPtr& chunks();
// Part i has sizes[i] elements and follows part i - 1. Its text is e.g. "RS,3,0,5".
PartitionPtr ragged(const std::vector<int64_t>& sizes);
// Blocks of `block` elements are dealt to the parts in turn; the last block may be shorter. Its text is e.g. "BC,4".
//   10 elements, blocks of 2, over 2 -> {0-2, 4-6, 8-10}, {2-4, 6-8}
PartitionPtr block_cyclic(int64_t block);
// Part i is parts[i], any set of intervals. Its text is e.g. "IS,0-2+6-8,2-6".
PartitionPtr interval_lists(const std::vector<Intervals>& parts);

// Throws std::invalid_argument, prefixed with `who`, when `partition` cannot cut `size` elements into `parts` parts: it
// fixes another number of parts or another size, or its parts omit an element or hold one twice.
void check_partition(const Partition& partition, int64_t size, int64_t parts, const std::string& who);

}  // namespace tessera
