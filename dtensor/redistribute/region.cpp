#include "tessera/dtensor/redistribute/region.h"

#include <ATen/ops/empty.h>

#include "tessera/mesh/core/reused_memory.h"
#include "tessera/mesh/core/wire.h"

namespace tessera {
namespace {

// Drops dimensions of size 1, and merges neighbouring dimensions that are contiguous in both memories.
void simplify(std::vector<int64_t>& sizes, std::vector<int64_t>& a, std::vector<int64_t>& b) {
  std::size_t kept = 0;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 1) continue;
    const bool joins = kept > 0 && a[kept - 1] == a[d] * sizes[d] && b[kept - 1] == b[d] * sizes[d];
    if (joins) {
      sizes[kept - 1] *= sizes[d];
      a[kept - 1] = a[d];
      b[kept - 1] = b[d];
    } else {
      sizes[kept] = sizes[d];
      a[kept] = a[d];
      b[kept] = b[d];
      ++kept;
    }
  }
  sizes.resize(kept);
  a.resize(kept);
  b.resize(kept);
}

}  // namespace

Region::Region(const Tile& positions, const std::vector<int64_t>& tensor_sizes) {
  std::vector<std::vector<Runs>> runs;
  for (const Intervals& each : positions) {
    sizes_.push_back(count(each));
    numel_ *= sizes_.back();
    box_ &= each.size() <= 1;
    begins_.push_back(each.empty() ? 0 : each.front().begin);
    runs.push_back(runs_of(each));
  }
  if (numel_ > 0) make_blocks(runs, tensor_sizes);
  find_offset(positions, tensor_sizes);
}

Region Region::within(const Tile& whole, const Tile& part) {
  Tile places;
  for (std::size_t d = 0; d < whole.size(); ++d) places.push_back(positions(whole[d], part[d]));
  return Region(places, shape_of(whole));
}

std::vector<Region::Runs> Region::runs_of(const Intervals& positions) {
  std::vector<Runs> out;
  int64_t packed = 0;
  for (const Interval& next : positions) {
    bool joins = !out.empty() && out.back().length == next.size();
    if (joins && out.back().count > 1) joins = next.begin == out.back().begin + out.back().count * out.back().stride;
    if (joins) {
      if (out.back().count == 1) out.back().stride = next.begin - out.back().begin;
      ++out.back().count;
    } else {
      out.push_back({.begin = next.begin, .length = next.size(), .count = 1, .stride = next.size(), .packed = packed});
    }
    packed += next.size();
  }
  return out;
}

void Region::make_blocks(const std::vector<std::vector<Runs>>& runs, const std::vector<int64_t>& tensor_sizes) {
  std::vector<Block> blocks(1);
  int64_t tensor_stride = 1;
  int64_t packed_stride = 1;
  // Dimensions are taken from the innermost outwards; each prepends its runs.
  for (std::size_t d = runs.size(); d-- > 0;) {
    std::vector<Block> wider;
    for (const Block& inner : blocks) {
      for (const Runs& r : runs[d]) {
        Block block = inner;
        const auto prepend = [&](int64_t size, int64_t in_tensor, int64_t in_packed) {
          block.sizes.insert(block.sizes.begin(), size);
          block.tensor_strides.insert(block.tensor_strides.begin(), in_tensor);
          block.packed_strides.insert(block.packed_strides.begin(), in_packed);
        };
        prepend(r.length, tensor_stride, packed_stride);
        if (r.count > 1) prepend(r.count, r.stride * tensor_stride, r.length * packed_stride);
        block.tensor_offset += r.begin * tensor_stride;
        block.packed_offset += r.packed * packed_stride;
        wider.push_back(std::move(block));
      }
    }
    blocks = std::move(wider);
    tensor_stride *= tensor_sizes[d];
    packed_stride *= sizes_[d];
  }
  for (Block& block : blocks) simplify(block.sizes, block.tensor_strides, block.packed_strides);
  blocks_ = std::move(blocks);
}

void Region::find_offset(const Tile& positions, const std::vector<int64_t>& tensor_sizes) {
  int64_t offset = 0;
  int64_t stride = 1;
  bool one_row = false;  // outside a partial dimension only one row may be taken
  for (std::size_t d = positions.size(); d-- > 0;) {
    if (numel_ > 0 && (positions[d].size() != 1 || (one_row && sizes_[d] != 1))) return;
    offset += begins_[d] * stride;
    stride *= tensor_sizes[d];
    one_row |= sizes_[d] != tensor_sizes[d];
  }
  flat_offset_ = numel_ > 0 ? offset : 0;
}

void Region::pack(const at::Tensor& tensor, const at::Tensor& packed, int64_t offset, TakeCopy take) const {
  for (const Block& b : blocks_) {
    take({.to = packed,
          .to_offset = offset + b.packed_offset,
          .to_strides = b.packed_strides,
          .from = tensor,
          .from_offset = b.tensor_offset,
          .from_strides = b.tensor_strides,
          .sizes = b.sizes});
  }
}

void Region::unpack(const at::Tensor& packed, int64_t offset, const at::Tensor& tensor, TakeCopy take) const {
  for (const Block& b : blocks_) {
    take({.to = tensor,
          .to_offset = b.tensor_offset,
          .to_strides = b.tensor_strides,
          .from = packed,
          .from_offset = offset + b.packed_offset,
          .from_strides = b.packed_strides,
          .sizes = b.sizes});
  }
}

void Region::pack(const at::Tensor& tensor, const at::Tensor& packed, int64_t offset) const {
  Copies copies;
  pack(tensor, packed, offset, copies);
  copies.run();
}

void Region::unpack(const at::Tensor& packed, int64_t offset, const at::Tensor& tensor) const {
  Copies copies;
  unpack(packed, offset, tensor, copies);
  copies.run();
}

void Region::copy(const at::Tensor& from, const Region& there, const at::Tensor& to) const {
  if (numel_ == 0) return;
  if (is_box() && there.is_box()) {
    // The strides of a box are the tensor's own.
    std::vector<int64_t> sizes = sizes_;
    std::vector<int64_t> from_strides = from.strides().vec();
    std::vector<int64_t> to_strides = to.strides().vec();
    simplify(sizes, to_strides, from_strides);
    copy_part({.to = to,
               .to_offset = there.blocks_[0].tensor_offset,
               .to_strides = to_strides,
               .from = from,
               .from_offset = blocks_[0].tensor_offset,
               .from_strides = from_strides,
               .sizes = sizes});
    return;
  }
  there.unpack(read(from).contiguous(), 0, to);
}

at::Tensor Region::read(const at::Tensor& tensor) const {
  if (tensor.sizes() == at::IntArrayRef(sizes_)) return tensor;
  if (box_) {
    int64_t offset = tensor.storage_offset();
    for (std::size_t d = 0; d < sizes_.size(); ++d) offset += begins_[d] * tensor.stride(static_cast<int64_t>(d));
    return as_view(tensor, sizes_, tensor.strides(), offset);
  }
  at::Tensor out = at::empty(sizes_, tensor.options());
  pack(tensor, out, 0);
  return out;
}

at::Tensor unaliased(const at::Tensor& result, const at::Tensor& source, bool owned) {
  const bool apart = !source.defined() || !result.is_alias_of(source) || (owned && result.numel() == source.numel());
  return apart ? result.contiguous() : reused_copy(result);
}

}  // namespace tessera
