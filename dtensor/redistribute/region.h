#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/redistribute/copies.h"
#include "tessera/placement/layout.h"

namespace tessera {

// Describes a part of a row-major tensor: some positions in each of its dimensions, and all combinations of them.
// Packed, it is a row-major tensor of sizes(). Copies run over blocks of evenly spaced runs, so that a cyclic part
// costs no more than a range.
class Region {
 public:
  // Makes the region of `positions` in a tensor of `tensor_sizes`.
  Region(const Tile& positions, const std::vector<int64_t>& tensor_sizes);
  // Returns the region of the tensor that holds `whole` in which `part` lies; both are tiles of the global tensor, and
  // `part` must be inside `whole`.
  static Region within(const Tile& whole, const Tile& part);

  const std::vector<int64_t>& sizes() const { return sizes_; }
  int64_t numel() const { return numel_; }
  // Says whether the region is one range in each dimension.
  bool is_box() const { return box_; }
  // Returns the position of the first element in the tensor if the region's elements are adjacent there, in order;
  // nullopt if not, and 0 if the region is empty.
  std::optional<int64_t> flat_offset() const { return flat_offset_; }

  // Copy between a contiguous `tensor` and numel() elements of a contiguous `packed` of the same dtype, starting at its
  // element `offset`.
  void pack(const at::Tensor& tensor, const at::Tensor& packed, int64_t offset) const;
  void unpack(const at::Tensor& packed, int64_t offset, const at::Tensor& tensor) const;
  // Give `take` the copies that these make, so that those of several regions can be made together.
  void pack(const at::Tensor& tensor, const at::Tensor& packed, int64_t offset, TakeCopy take) const;
  void unpack(const at::Tensor& packed, int64_t offset, const at::Tensor& tensor, TakeCopy take) const;
  // Copies this region of `from` to the region `there` of `to`, which has the same sizes.
  void copy(const at::Tensor& from, const Region& there, const at::Tensor& to) const;
  // Returns the region as a tensor of sizes(): a view, of any strides, if it is a box, else a packed copy.
  at::Tensor read(const at::Tensor& tensor) const;

 private:
  // Describes `count` evenly spaced runs of `length` positions each, whose starts are `stride` apart.
  struct Runs {
    int64_t begin;
    int64_t length;
    int64_t count;
    int64_t stride;
    int64_t packed;  // the number of positions of the dimension before these
  };
  // Describes one combination of Runs, one per dimension, as strides over memory in elements.
  struct Block {
    std::vector<int64_t> sizes;
    std::vector<int64_t> tensor_strides;
    std::vector<int64_t> packed_strides;
    int64_t tensor_offset = 0;
    int64_t packed_offset = 0;
  };
  static std::vector<Runs> runs_of(const Intervals& positions);
  void make_blocks(const std::vector<std::vector<Runs>>& runs, const std::vector<int64_t>& tensor_sizes);
  void find_offset(const Tile& positions, const std::vector<int64_t>& tensor_sizes);

  std::vector<int64_t> sizes_;
  int64_t numel_ = 1;
  std::optional<int64_t> flat_offset_;
  bool box_ = true;
  std::vector<int64_t> begins_;
  std::vector<Block> blocks_;
};

// Returns `result` in row-major order, copied if it shares storage with `source`, if there is one. With `owned` nobody
// reads `source` later, so a result with all of its elements may keep that storage.
at::Tensor unaliased(const at::Tensor& result, const at::Tensor& source, bool owned = false);

}  // namespace tessera
