#include "tessera/dtensor/data/global_batches.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <stdexcept>

#include <fmt/format.h>

#include "tessera/dtensor/data/permutation.h"
#include "tessera/placement/intervals.h"
#include "tessera/placement/layout.h"
#include "tessera/placement/partition.h"

namespace tessera {
namespace {

constexpr int64_t kMostSamples = int64_t{1} << 62;  // as Permutation has

void check_micro_batch(int64_t step, int64_t batch_size, int64_t index, int64_t count) {
  if (step < 0) throw std::invalid_argument(fmt::format("GlobalBatches: there is no step {}; steps begin at 0", step));
  const int64_t last = (std::numeric_limits<int64_t>::max() - batch_size) / batch_size;
  if (step > last) {
    throw std::invalid_argument(fmt::format(
        "GlobalBatches: there is no step {} in batches of {}; the last one is {}, since samples are counted in 63 bits",
        step, batch_size, last));
  }
  if (index >= 0 && index < count) return;
  throw std::invalid_argument(
      fmt::format("GlobalBatches: there is no micro-batch {} of {}; they are counted from 0", index, count));
}

Placements checked(const Placements& placements, const Mesh& mesh, const char* who) {
  Placements out = normalize(placements, mesh, /*ndim=*/1, who);
  if (std::none_of(out.begin(), out.end(), [](const Placement& each) { return each.is_partial(); })) return out;
  throw std::invalid_argument(
      fmt::format("{}: samples are cut or whole, but the placements are {}; give Shard(0) on the mesh dimensions that "
                  "cut the batch, and Replicate() on all others",
                  who, to_string(placements)));
}

std::vector<int64_t> coordinate_on(const DeviceMesh& mesh, const char* who) {
  if (const auto& coordinate = mesh.coordinate()) return *coordinate;
  throw std::invalid_argument(fmt::format("{}: rank {} is not in the mesh {}; call it on the ranks of the mesh", who,
                                          mesh.world().rank(), mesh.to_string()));
}

}  // namespace

GlobalBatches::GlobalBatches(int64_t samples, int64_t batch_size, uint64_t seed)
    : samples_(samples), batch_size_(batch_size), seed_(seed) {
  if (samples >= 1 && samples <= kMostSamples && batch_size >= 1) return;
  throw std::invalid_argument(
      fmt::format("GlobalBatches: {} samples in batches of {}; give at least 1 of each, and at most 2^62 samples",
                  samples, batch_size));
}

std::vector<int64_t> GlobalBatches::at_positions(int64_t begin, int64_t end) const {
  std::vector<int64_t> out;
  out.reserve(static_cast<std::size_t>(end - begin));
  std::optional<Permutation> order;
  int64_t epoch = -1;
  for (int64_t position = begin; position < end; ++position) {
    if (position / samples_ != epoch) {
      epoch = position / samples_;
      order.emplace(samples_, seed_, static_cast<uint64_t>(epoch));
    }
    out.push_back(order->at(position % samples_));
  }
  return out;
}

std::vector<int64_t> GlobalBatches::of_step(int64_t step) const { return micro_batch(step, 0, 1); }

std::vector<int64_t> GlobalBatches::micro_batch(int64_t step, int64_t index, int64_t count) const {
  check_micro_batch(step, batch_size_, index, count);
  const Interval range = chunk_range(batch_size_, count, index);
  return at_positions(step * batch_size_ + range.begin, step * batch_size_ + range.end);
}

std::vector<int64_t> GlobalBatches::local(int64_t step, const Mesh& mesh, const Placements& placements,
                                          std::span<const int64_t> coordinate, int64_t index, int64_t count) const {
  check_micro_batch(step, batch_size_, index, count);
  const Placements normalized = checked(placements, mesh, "GlobalBatches");
  const Interval range = chunk_range(batch_size_, count, index);
  const std::array<int64_t, 1> shape = {range.size()};
  check_layout(normalized, mesh, shape, "GlobalBatches");
  std::vector<int64_t> out;
  const int64_t first = step * batch_size_ + range.begin;
  const Tile tile = local_tile(shape, normalized, mesh.shape(), coordinate);
  for (const Interval& part : tile.front()) {
    const std::vector<int64_t> samples = at_positions(first + part.begin, first + part.end);
    out.insert(out.end(), samples.begin(), samples.end());
  }
  return out;
}

std::vector<int64_t> GlobalBatches::local(int64_t step, const DeviceMesh& mesh, const Placements& placements,
                                          int64_t index, int64_t count) const {
  return local(step, mesh.mesh(), placements, coordinate_on(mesh, "GlobalBatches"), index, count);
}

Interval rows_here(int64_t rows, const DeviceMesh& mesh, const Placements& placements) {
  if (rows < 0) throw std::invalid_argument(fmt::format("rows_here: {} rows; give 0 or more", rows));
  const std::vector<int64_t> coordinate = coordinate_on(mesh, "rows_here");
  const Placements normalized = checked(placements, mesh.mesh(), "rows_here");
  const std::array<int64_t, 1> shape = {rows};
  check_layout(normalized, mesh.mesh(), shape, "rows_here");
  for (const int64_t rank : mesh.mesh().ranks()) {
    const Tile tile = local_tile(shape, normalized, mesh.mesh().shape(), *mesh.mesh().coordinate_of(rank));
    if (tile.front().size() <= 1) continue;
    throw std::invalid_argument(
        fmt::format("rows_here: as {} rank {} has {} separate parts of {} rows; give Shard(0), whose rows are adjacent",
                    to_string(placements), rank, tile.front().size(), rows));
  }
  const Tile tile = local_tile(shape, normalized, mesh.mesh().shape(), coordinate);
  return tile.front().empty() ? Interval{0, 0} : tile.front().front();
}

}  // namespace tessera
