#include "tessera/inspect/layout_grid.h"

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tessera {
namespace {

constexpr std::size_t kMostRows = 24;
constexpr std::size_t kMostColumns = 16;
constexpr std::size_t kMostSlices = 16;

struct RankTile {
  int64_t rank;
  std::vector<int64_t> coordinate;
  Tile tile;
};

std::vector<RankTile> tiles_of(const std::vector<int64_t>& shape, const Mesh& mesh, const Placements& placements) {
  std::vector<RankTile> out;
  for (const int64_t rank : mesh.ranks()) {
    std::vector<int64_t> coordinate = *mesh.coordinate_of(rank);
    Tile tile = local_tile(shape, placements, mesh.shape(), coordinate);
    out.push_back({.rank = rank, .coordinate = std::move(coordinate), .tile = std::move(tile)});
  }
  return out;
}

bool is_empty(const Tile& tile) {
  return std::ranges::any_of(tile, [](const Intervals& part) { return part.empty(); });
}

// Returns the longest intervals of a tensor dimension of which every rank holds all elements or none.
std::vector<Interval> segments_of(int64_t size, std::size_t tensor_dim, const std::vector<RankTile>& tiles) {
  std::set<int64_t> bounds = {0, size};
  for (const RankTile& each : tiles) {
    for (const Interval& part : each.tile[tensor_dim]) bounds.insert({part.begin, part.end});
  }
  std::vector<Interval> out;
  for (auto it = bounds.begin(); std::next(it) != bounds.end(); ++it) out.push_back({*it, *std::next(it)});
  return out;
}

bool holds(const Intervals& part, int64_t element) {
  return std::ranges::any_of(part, [&](const Interval& i) { return i.begin <= element && element < i.end; });
}

// Returns "sum" for [S(0), P(sum)], and "sum/avg" where both are pending.
std::string pending_of(const Placements& placements) {
  std::vector<std::string> names;
  for (const Placement& p : placements) {
    if (!p.is_partial()) continue;
    const std::string text = to_string(p);  // P(sum)
    const std::string name = text.substr(2, text.size() - 3);
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  }
  return fmt::format("{}", fmt::join(names, "/"));
}

// Ranks that differ in coordinates of pending reductions alone hold the terms of one value.
std::string holders_text(const std::vector<const RankTile*>& holders, const Placements& placements,
                         const std::string& pending) {
  std::map<std::vector<int64_t>, std::vector<int64_t>> copies;
  std::vector<int64_t> all;
  for (const RankTile* const holder : holders) {
    std::vector<int64_t> copy = holder->coordinate;
    for (std::size_t i = 0; i < placements.size(); ++i) copy[i] = placements[i].is_partial() ? 0 : copy[i];
    copies[copy].push_back(holder->rank);
    all.push_back(holder->rank);
  }
  if (pending.empty()) return ranks_text(all);
  std::vector<std::string> texts;
  texts.reserve(copies.size());
  for (const auto& [copy, ranks] : copies) texts.push_back(fmt::format("{}({})", pending, ranks_text(ranks)));
  return fmt::format("{}", fmt::join(texts, ", "));
}

// Makes the cells of a grid.
class Cells {
 public:
  Cells(const std::vector<RankTile>& tiles, const Placements& placements)
      : tiles_(tiles), placements_(placements), pending_(pending_of(placements)) {}

  // `at` has one element of the cell per tensor dimension.
  LayoutCell at(const std::vector<int64_t>& at) const {
    std::vector<const RankTile*> holders;
    for (const RankTile& each : tiles_) {
      bool here = true;
      for (std::size_t d = 0; d < at.size() && here; ++d) here = holds(each.tile[d], at[d]);
      if (here) holders.push_back(&each);
    }
    LayoutCell cell{.ranks = {}, .text = holders_text(holders, placements_, pending_), .pending = !pending_.empty()};
    for (const RankTile* const holder : holders) cell.ranks.push_back(holder->rank);
    return cell;
  }

 private:
  const std::vector<RankTile>& tiles_;
  const Placements& placements_;
  const std::string pending_;
};

// Chooses rows and columns: the last two tensor dimensions that are cut, else one that is cut and a whole one beside
// it.
void choose_dims(LayoutGrid& grid, const std::vector<std::vector<Interval>>& segments) {
  const auto ndim = static_cast<int64_t>(segments.size());
  std::vector<int64_t> cut;
  for (int64_t d = 0; d < ndim; ++d) {
    if (segments[static_cast<std::size_t>(d)].size() > 1) cut.push_back(d);
  }
  if (ndim == 1) {
    grid.column_dim = 0;
  } else if (ndim > 1) {
    const int64_t last = cut.empty() ? ndim - 1 : cut.back();
    const int64_t before = cut.size() > 1 ? cut[cut.size() - 2] : last == ndim - 1 ? ndim - 2 : last;
    grid.row_dim = before;
    grid.column_dim = before == last ? ndim - 1 : last;
  }
}

std::string slice_text(const LayoutGrid& grid, const std::vector<std::vector<Interval>>& segments,
                       const std::vector<std::size_t>& chosen) {
  std::vector<std::string> parts;
  for (std::size_t d = 0; d < segments.size(); ++d) {
    const bool drawn = static_cast<int64_t>(d) == grid.row_dim || static_cast<int64_t>(d) == grid.column_dim;
    const Interval& part = segments[d][chosen[d]];
    parts.push_back(drawn || segments[d].size() == 1 ? ":" : fmt::format("{}-{}", part.begin, part.end));
  }
  return fmt::format("[{}]", fmt::join(parts, ", "));
}

// Calls `visit` with each choice of one index per size, the last varying fastest.
template <class Visit>
void each_choice(const std::vector<std::size_t>& sizes, const Visit& visit) {
  std::vector<std::size_t> chosen(sizes.size(), 0);
  for (std::size_t d = sizes.size() + 1; d > 0;) {
    visit(chosen);
    for (d = sizes.size(); d > 0 && ++chosen[d - 1] == sizes[d - 1]; --d) chosen[d - 1] = 0;
  }
}

void add_slices(LayoutGrid& grid, const std::vector<std::vector<Interval>>& segments, const Cells& cells) {
  std::vector<std::size_t> sizes(segments.size(), 1);
  std::size_t slices = 1;
  for (std::size_t d = 0; d < segments.size(); ++d) {
    if (static_cast<int64_t>(d) == grid.row_dim || static_cast<int64_t>(d) == grid.column_dim) continue;
    sizes[d] = segments[d].size();
    slices *= sizes[d];
  }
  grid.too_fine = slices > kMostSlices || grid.rows.size() > kMostRows || grid.columns.size() > kMostColumns;
  if (grid.too_fine) return;
  each_choice(sizes, [&](const std::vector<std::size_t>& chosen) {
    LayoutSlice& slice = grid.slices.emplace_back();
    if (slices > 1) slice.text = slice_text(grid, segments, chosen);
    std::vector<int64_t> at(segments.size());
    for (std::size_t d = 0; d < at.size(); ++d) {
      at[d] = segments[d][chosen[d]].begin;
      slice.box.push_back(sizes[d] == 1 ? Interval{0, segments[d].back().end} : segments[d][chosen[d]]);
    }
    for (const Interval& row : grid.rows) {
      if (grid.row_dim >= 0) at[static_cast<std::size_t>(grid.row_dim)] = row.begin;
      for (const Interval& column : grid.columns) {
        if (grid.column_dim >= 0) at[static_cast<std::size_t>(grid.column_dim)] = column.begin;
        slice.cells.push_back(cells.at(at));
      }
    }
  });
}

std::string tile_text(const RankTile& each) {
  std::vector<std::string> parts;
  for (const Intervals& part : each.tile) parts.push_back(to_string(part));
  return fmt::format("rank {}: [{}]", each.rank, fmt::join(parts, ", "));
}

}  // namespace

std::string ranks_text(const std::vector<int64_t>& ranks) {
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - i < 3) end = i + 1;
    parts.push_back(end - i == 1 ? fmt::format("{}", ranks[i]) : fmt::format("{}..{}", ranks[i], ranks[end - 1]));
    i = end;
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

LayoutGrid layout_grid(const std::vector<int64_t>& shape, const Mesh& mesh, const Placements& given) {
  if (std::ranges::any_of(shape, [](const int64_t size) { return size < 0; })) {
    throw std::invalid_argument(fmt::format(
        "visualize: the global shape [{}] has a negative size; give sizes of 0 or more", fmt::join(shape, ", ")));
  }
  const Placements placements = normalize(given, mesh, static_cast<int64_t>(shape.size()), "visualize");
  check_layout(placements, mesh, shape, "visualize");
  const std::vector<RankTile> tiles = tiles_of(shape, mesh, placements);
  LayoutGrid grid;
  grid.title = fmt::format("[{}] on {} as {}", fmt::join(shape, ", "), mesh.to_string(), to_string(placements));
  for (const RankTile& each : tiles) {
    if (is_empty(each.tile)) grid.empty_ranks.push_back(each.rank);
    grid.tiles.push_back(tile_text(each));
  }
  if (grid.empty_ranks.size() == tiles.size()) return grid;  // the tensor has no elements
  std::vector<std::vector<Interval>> segments;
  for (std::size_t d = 0; d < shape.size(); ++d) segments.push_back(segments_of(shape[d], d, tiles));
  choose_dims(grid, segments);
  const std::vector<Interval> one = {{0, 1}};
  grid.rows = grid.row_dim < 0 ? one : segments[static_cast<std::size_t>(grid.row_dim)];
  grid.columns = grid.column_dim < 0 ? one : segments[static_cast<std::size_t>(grid.column_dim)];
  add_slices(grid, segments, Cells(tiles, placements));
  return grid;
}

}  // namespace tessera
