#include "tessera/ops/rules/view_tiles.h"

#include <algorithm>
#include <span>

#include <ATen/ceil_div.h>
#include <c10/util/accumulate.h>

#include "tessera/ops/rules/view_groups.h"

namespace tessera::rules {
namespace {

using Sizes = std::vector<int64_t>;

bool contains(const Intervals& part, int64_t index) {
  return std::ranges::any_of(part, [&](const Interval& i) { return i.begin <= index && index < i.end; });
}

// ---- merging dimensions into one, and splitting one into several; elements are counted row-major --------------------

// Intervals of complete rows are scaled; others are repeated for each row.
std::optional<Intervals> flattened(std::span<const Intervals> parts, std::span<const int64_t> sizes) {
  if (parts.size() == 1) return parts[0];
  const int64_t inner = c10::multiply_integers(sizes.subspan(1));
  const std::optional<Intervals> rest = flattened(parts.subspan(1), sizes.subspan(1));
  if (!rest) return std::nullopt;
  Intervals out;
  const bool whole = count(*rest) == inner;
  for (const Interval& rows : parts[0]) {
    if (whole) append(out, {.begin = rows.begin * inner, .end = rows.end * inner});
    for (int64_t row = rows.begin; row < rows.end && !whole; ++row) {
      if (out.size() + rest->size() > kMostIntervals) return std::nullopt;
      for (const Interval& i : *rest) append(out, {.begin = row * inner + i.begin, .end = row * inner + i.end});
    }
  }
  return out;
}

// Describes rows of `inner` elements each, of which the same elements are held in every row.
struct Rows {
  Intervals rows;
  Intervals of_each;
};

std::optional<Rows> split(const Intervals& elements, int64_t inner) {
  Rows out;
  Intervals open;  // of the row that may still be incomplete
  int64_t open_row = -1;
  bool first = true;
  bool alike = true;
  const auto take = [&](int64_t begin, int64_t end, const Intervals& held) {
    alike = alike && (first || held == out.of_each);
    out.of_each = held;
    first = false;
    append(out.rows, {.begin = begin, .end = end});
  };
  const auto close = [&] {
    if (open_row >= 0) take(open_row, open_row + 1, open);
    open.clear();
    open_row = -1;
  };
  for (Interval left : elements) {
    while (left.size() > 0) {
      const int64_t row = left.begin / inner;
      const int64_t end = std::min(left.end, (row + 1) * inner);
      if (left.begin == row * inner && left.end >= (row + 1) * inner) {
        close();
        const int64_t past = left.end / inner;
        take(row, past, one_interval(0, inner));
        left.begin = past * inner;
        continue;
      }
      if (row != open_row) close();
      open_row = row;
      append(open, {.begin = left.begin - row * inner, .end = end - row * inner});
      left.begin = end;
    }
  }
  close();
  return alike ? std::optional(out) : std::nullopt;
}

bool unflatten(const Intervals& elements, std::span<const int64_t> sizes, Tile& out) {
  if (sizes.size() == 1) {
    out.push_back(elements);
    return true;
  }
  const std::optional<Rows> rows = split(elements, c10::multiply_integers(sizes.subspan(1)));
  if (!rows) return false;
  out.push_back(rows->rows);
  return unflatten(rows->of_each, sizes.subspan(1), out);
}

// Holds the shortest ranges of dimensions with equal products, from the front. Dimensions of size 1 belong to the range
// before them.
struct Range {
  std::size_t from_begin, from_end, to_begin, to_end;
};

std::vector<Range> ranges_of(const Sizes& from, const Sizes& to) {
  std::vector<Range> out;
  std::size_t i = 0;
  std::size_t j = 0;
  while (i < from.size() || j < to.size()) {
    Range range{i, i, j, j};
    int64_t left = i < from.size() ? from[i++] : 1;
    int64_t right = j < to.size() ? to[j++] : 1;
    while (left != right) {
      if (left < right) {
        left *= from[i++];
      } else {
        right *= to[j++];
      }
    }
    while (i < from.size() && from[i] == 1 && (j >= to.size() || to[j] != 1)) ++i;
    while (j < to.size() && to[j] == 1 && (i >= from.size() || from[i] != 1)) ++j;
    range.from_end = i;
    range.to_end = j;
    out.push_back(range);
  }
  return out;
}

}  // namespace

TileView slice_tiles(int64_t dim, int64_t start, int64_t step, int64_t length) {
  return [=](const Tile& tile) -> std::optional<Tile> {
    Tile out = tile;
    const Intervals& held = tile.at(static_cast<std::size_t>(dim));
    if (step != 1 && held.size() > 1) return std::nullopt;
    Intervals& left = out[static_cast<std::size_t>(dim)];
    left.clear();
    for (const Interval& i : held) {
      const auto first_from = [&](int64_t at) {
        return std::min(at::ceil_div(std::max<int64_t>(at - start, 0), step), length);
      };
      append(left, {.begin = first_from(i.begin), .end = first_from(i.end)});
    }
    return out;
  };
}

int64_t slice_start(std::optional<int64_t> asked, int64_t size) {
  const int64_t start = asked.value_or(0);
  return std::clamp<int64_t>(start < 0 ? start + size : start, 0, size);
}

TileView select_tiles(int64_t dim, int64_t index) {
  return [=](const Tile& tile) -> std::optional<Tile> {
    Tile out = tile;
    out.erase(out.begin() + dim);
    if (!contains(tile.at(static_cast<std::size_t>(dim)), index)) std::ranges::fill(out, Intervals());
    return out;
  };
}

DiagonalStart diagonal_start(int64_t offset) {
  return {.row = std::max<int64_t>(-offset, 0), .column = std::max<int64_t>(offset, 0)};
}

TileView diagonal_tiles(int64_t dim1, int64_t dim2, int64_t offset, int64_t length) {
  const auto [row, column] = diagonal_start(offset);
  return [=, in_rows = slice_tiles(0, row, 1, length),
          in_columns = slice_tiles(0, column, 1, length)](const Tile& tile) -> std::optional<Tile> {
    const Intervals& rows = tile.at(static_cast<std::size_t>(dim1));
    const Intervals& columns = tile.at(static_cast<std::size_t>(dim2));
    Intervals held = intersect(in_rows({rows})->front(), in_columns({columns})->front());
    if (held.size() > 1) return std::nullopt;
    Tile out = tile;
    out.erase(out.begin() + std::max(dim1, dim2));
    out.erase(out.begin() + std::min(dim1, dim2));
    out.push_back(std::move(held));
    return out;
  };
}

TileView regroup_tiles(const Sizes& from, const Sizes& to) {
  if (has_zero(from) || has_zero(to)) {
    return [](const Tile&) -> std::optional<Tile> { return std::nullopt; };
  }
  return [=, ranges = ranges_of(from, to)](const Tile& tile) -> std::optional<Tile> {
    Tile out;
    for (const Range& r : ranges) {
      const std::span<const Intervals> parts(tile.data() + r.from_begin, r.from_end - r.from_begin);
      const std::span<const int64_t> sizes(from.data() + r.from_begin, r.from_end - r.from_begin);
      const std::span<const int64_t> wanted(to.data() + r.to_begin, r.to_end - r.to_begin);
      const std::optional<Intervals> elements =
          parts.empty() ? std::optional(one_interval(0, 1)) : flattened(parts, sizes);
      if (!elements) return std::nullopt;
      if (wanted.empty()) {
        if (elements->empty()) return std::nullopt;  // a cut of a dimension of size 1 that is removed
        continue;
      }
      if (!unflatten(*elements, wanted, out)) return std::nullopt;
    }
    return out;
  };
}

}  // namespace tessera::rules
