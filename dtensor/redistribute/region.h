#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/placement/layout.h"

namespace tessera {

// A part of a row-major tensor: for each of its dimensions some positions, and all combinations of them. Packed, it is
// a row-major tensor of sizes(). Copies go by blocks of evenly spaced runs, so that cyclic parts cost no more than
// ranges.
class Region {
 public:
  // `positions` within a tensor of `tensor_sizes`.
  Region(const Tile& positions, const std::vector<int64_t>& tensor_sizes);
  // Where `part` of the global tensor, all of it in `whole`, stands in the tensor that holds `whole`.
  static Region within(const Tile& whole, const Tile& part);

  const std::vector<int64_t>& sizes() const { return sizes_; }
  int64_t numel() const { return numel_; }
  // One range in each dimension.
  bool is_box() const { return box_; }
  // The first element's place in the tensor when the region lies there in one piece, in order; nullopt otherwise. 0
  // when empty.
  std::optional<int64_t> flat_offset() const { return flat_offset_; }

  // Between a contiguous `tensor` and `packed`, contiguous, of numel() elements of the same dtype, from its element
  // `offset` on.
  void pack(const at::Tensor& tensor, const at::Tensor& packed, int64_t offset) const;
  void unpack(const at::Tensor& packed, int64_t offset, const at::Tensor& tensor) const;
  // From here in `from` to `there` in `to`, a region of the same sizes.
  void copy(const at::Tensor& from, const Region& there, const at::Tensor& to) const;
  // Packed; a view, of any strides, where the region is a box.
  at::Tensor read(const at::Tensor& tensor) const;

 private:
  // Evenly spaced runs: count of them, of `length` positions each, their starts `stride` apart.
  struct Runs {
    int64_t begin;
    int64_t length;
    int64_t count;
    int64_t stride;
    int64_t packed;  // positions of the dimension before it
  };
  // One Runs for each dimension as strides over memory, in elements.
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

// `result`, row-major; a copy where it shares storage with `source`.
at::Tensor unaliased(const at::Tensor& result, const at::Tensor& source);

}  // namespace tessera
