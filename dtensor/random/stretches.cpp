#include "tessera/dtensor/random/stretches.h"

#include <vector>

namespace tessera::detail {
namespace {

// Visits the stretches in the dimensions from `dim` on. The dimensions behind `last` are whole, and make `inner`
// numbers per index of `last`. `prefix` is the row-major index in the dimensions before `dim`.
void visit_stretches(std::span<const int64_t> sizes, const Tile& tile, std::size_t dim, std::size_t last, int64_t inner,
                     int64_t prefix, int64_t& local, Run run) {
  for (const Interval& part : tile[dim]) {
    const int64_t first = prefix * sizes[dim] + part.begin;
    if (dim == last) {
      run(first * inner, local, part.size() * inner);
      local += part.size() * inner;
      continue;
    }
    for (int64_t i = 0; i < part.size(); ++i) {
      visit_stretches(sizes, tile, dim + 1, last, inner, first + i, local, run);
    }
  }
}

// Holds one dimension of a tile, or several that are one in a row-major tensor.
struct Merged {
  int64_t size;
  Intervals held;

  bool whole() const { return count(held) == size; }
};

// Returns the tile's dimensions, the last one first. A whole dimension is merged with the one before it.
std::vector<Merged> merged(std::span<const int64_t> sizes, const Tile& tile, int64_t width) {
  std::vector<Merged> dims = {{width, one_interval(0, width)}};
  for (std::size_t d = tile.size(); d-- > 0;) {
    if (!dims.back().whole()) {
      dims.push_back({sizes[d], tile[d]});
      continue;
    }
    const int64_t inner = dims.back().size;
    dims.back() = {sizes[d] * inner, tile[d]};
    for (Interval& part : dims.back().held) part = {part.begin * inner, part.end * inner};
  }
  return dims;
}

// Says whether the intervals are blocks of one size at equal distances, of which the last may be shorter.
bool are_blocks(const Intervals& held) {
  const int64_t block = held.front().size();
  for (std::size_t i = 1; i < held.size(); ++i) {
    if (held[i].begin - held[i - 1].begin != held[1].begin - held[0].begin) return false;
    if (i + 1 == held.size() ? held[i].size() > block : held[i].size() != block) return false;
  }
  return true;
}

}  // namespace

void each_stretch(std::span<const int64_t> sizes, const Tile& tile, int64_t width, Run run) {
  std::size_t cut = tile.size();
  int64_t inner = width;
  while (cut > 0 && count(tile[cut - 1]) == sizes[cut - 1]) inner *= sizes[--cut];
  int64_t local = 0;
  if (cut == 0) {
    run(0, 0, inner);
  } else {
    visit_stretches(sizes, tile, 0, cut - 1, inner, 0, local, run);
  }
}

bool describe_piece(std::span<const int64_t> sizes, const Tile& tile, int64_t width, gpu::PieceTable& piece) {
  const std::vector<Merged> dims = merged(sizes, tile, width);
  if (dims.size() > gpu::kMaxDims) return false;
  piece = {.ndim = static_cast<int32_t>(dims.size())};
  int32_t used = 0;
  for (std::size_t d = 0; d < dims.size(); ++d) {
    const auto& [size, held] = dims[dims.size() - 1 - d];
    gpu::Dim& dim = piece.dims[d];
    dim = {.size = size, .held = count(held), .begin = held.front().begin, .block = held.front().size()};
    if (held.size() > 1) dim.period = held[1].begin - held[0].begin;
    if (are_blocks(held)) continue;
    if (used + held.size() > gpu::kMaxIntervals) return false;
    dim.first = used;
    dim.count = static_cast<int32_t>(held.size());
    int64_t before = 0;
    for (const Interval& part : held) {
      piece.intervals[used++] = {.begin = part.begin, .before = before};
      before += part.size();
    }
  }
  return true;
}

}  // namespace tessera::detail
