#include "tessera/dtensor/io/state_plan.h"

#include <algorithm>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/checkpoint_index.h"
#include "tessera/dtensor/io/strict_json.h"

namespace tessera {
namespace {

constexpr int64_t kSmallestShare = 64 << 10;

Tile whole_tile(const std::vector<int64_t>& shape) {
  Tile tile;
  for (const int64_t size : shape) tile.push_back(one_interval(0, size));
  return tile;
}

int64_t elements_of(const Tile& tile) {
  int64_t elements = 1;
  for (const Intervals& part : tile) elements *= count(part);
  return elements;
}

// Returns the numbers, in row-major order, of the combinations of indexes that the tile has of the first `dims`
// dimensions.
std::vector<int64_t> rows_of(const std::vector<int64_t>& shape, const Tile& tile, std::size_t dims) {
  std::vector<int64_t> rows = {0};
  for (std::size_t dim = 0; dim < dims; ++dim) {
    std::vector<int64_t> next;
    next.reserve(rows.size() * static_cast<std::size_t>(count(tile[dim])));
    for (const int64_t row : rows) {
      for (const Interval& part : tile[dim]) {
        for (int64_t i = part.begin; i < part.end; ++i) next.push_back(row * shape[dim] + i);
      }
    }
    rows = std::move(next);
  }
  return rows;
}

// Returns this rank's share of its tile of a DTensor: the ranks along mesh dimensions that replicate hold the same one.
ShareOfTile own_share(const Spec& spec, int64_t element_bytes) {
  int64_t replicas = 1;
  int64_t replica = 0;
  for (int64_t dim = 0; dim < spec.mesh.ndim(); ++dim) {
    if (!spec.placements[static_cast<std::size_t>(dim)].is_replicate()) continue;
    replicas *= spec.mesh.size(dim);
    replica = replica * spec.mesh.size(dim) + spec.mesh.local_rank(dim);
  }
  return share_of(elements_of(spec.tile), element_bytes, replicas, replica);
}

}  // namespace

ShareOfTile share_of(int64_t elements, int64_t element_bytes, int64_t replicas, int64_t replica) {
  const int64_t grain = std::max<int64_t>(1, kSmallestShare / element_bytes);
  const auto bound = [&](int64_t i) { return i == replicas ? elements : elements * i / replicas / grain * grain; };
  return {bound(replica), bound(replica + 1)};
}

void for_each_run(const std::vector<int64_t>& shape, const Tile& tile, const ShareOfTile& share,
                  const std::function<void(int64_t begin, int64_t count)>& run) {
  // Dimensions after the last one that is cut lie in one piece below each of its indexes.
  std::size_t dims = shape.size();
  int64_t below = 1;
  while (dims > 0 && count(tile[dims - 1]) == shape[dims - 1]) below *= shape[--dims];
  const Intervals last = dims == 0 ? one_interval(0, 1) : tile[dims - 1];
  int64_t packed = 0;  // the number of the tile's elements before the ones that are visited
  for (const int64_t row : rows_of(shape, tile, dims == 0 ? 0 : dims - 1)) {
    const int64_t row_begin = row * (dims == 0 ? below : shape[dims - 1] * below);
    for (const Interval& part : last) {
      const int64_t from = std::max(share.first - packed, int64_t{0});
      const int64_t to = std::min(share.last - packed, part.size() * below);
      if (to > from) run(row_begin + part.begin * below + from, to - from);
      packed += part.size() * below;
    }
  }
}

void check_meshes(const std::vector<SavedTensor>& tensors, const DeviceMesh& mesh, const char* op) {
  for (const SavedTensor& item : tensors) {
    if (!is_dtensor(item.tensor)) continue;
    const DeviceMesh& own = mesh_of(item.tensor);
    const bool inside = std::ranges::all_of(
        own.mesh().ranks(), [&](int64_t rank) { return std::ranges::count(mesh.mesh().ranks(), rank) > 0; });
    if (inside && &own.world() == &mesh.world()) continue;
    throw std::invalid_argument(
        fmt::format("{}: tensor {} is on {}, not within the state's mesh {}; pass a mesh that "
                    "has all ranks of the tensors",
                    op, in_quotes(item.name), own.to_string(), mesh.to_string()));
  }
}

void append_files(StatePlan& plan, const std::string& name, const std::vector<SavedTensor>& tensors,
                  const std::vector<SafetensorsHeader>& headers) {
  std::unordered_map<std::string, const at::Tensor*> by_name;
  for (const SavedTensor& item : tensors) by_name.emplace(item.name, &item.tensor);
  WeightMap weights;
  int64_t total = 0;
  const auto parts = static_cast<int64_t>(headers.size());
  for (int64_t i = 0; i < parts; ++i) {
    const SafetensorsHeader& header = headers[static_cast<std::size_t>(i)];
    FilePlan file = {.name = parts == 1 ? name : part_name(name, i, parts, 1),
                     .head = serialize_safetensors_header(header)};
    const auto head_bytes = static_cast<int64_t>(file.head.size());
    file.bytes = head_bytes + header.data_bytes();
    for (const TensorEntry& entry : header.tensors) {
      weights.emplace(entry.name, file.name);
      plan.tensors.push_back({.tensor = *by_name.at(entry.name),
                              .element_bytes = static_cast<int64_t>(c10::elementSize(entry.dtype)),
                              .file = plan.files.size(),
                              .data_begin = head_bytes + entry.begin,
                              .shape = entry.shape});
    }
    total += header.data_bytes();
    plan.files.push_back(std::move(file));
  }
  if (parts == 1) return;
  const std::string index = serialize_checkpoint_index(weights, total);
  plan.files.push_back({.name = index_path(name), .head = index, .bytes = static_cast<int64_t>(index.size())});
}

void find_share(TensorToWrite& item, bool is_first_rank) {
  if (!is_dtensor(item.tensor)) {
    item.tile = whole_tile(item.shape);
    item.share = {0, is_first_rank ? elements_of(item.tile) : 0};
  } else if (is_held(item.tensor)) {
    item.tile = spec_of(item.tensor).tile;
    item.share = own_share(spec_of(item.tensor), item.element_bytes);
  }
}

}  // namespace tessera
