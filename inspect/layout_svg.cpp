#include "tessera/inspect/layout_svg.h"

#include <algorithm>

#include <fmt/format.h>

#include "tessera/inspect/svg.h"

namespace tessera {
namespace {

constexpr double kMargin = 12;
constexpr double kLine = 18;        // the height of a line of text
constexpr double kGridWidth = 360;  // of cells whose texts need less
constexpr double kGridHeight = 120;
constexpr std::size_t kMostStripes = 8;
constexpr std::size_t kMostTiles = 16;

std::string interval_text(const Interval& interval) { return fmt::format("{}-{}", interval.begin, interval.end); }

// Returns the sizes of cells along one axis: as the intervals, but at least `least`, in sum at least `total`.
std::vector<double> extents(const std::vector<Interval>& parts, double total, const std::vector<double>& least) {
  const double elements = static_cast<double>(parts.back().end - parts.front().begin);
  std::vector<double> out;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    out.push_back(std::max(least[i], total * static_cast<double>(parts[i].size()) / elements));
  }
  return out;
}

// Draws layouts one below the other.
class Drawing {
 public:
  void layout(const LayoutGrid& grid) {
    line(grid.title);
    if (grid.too_fine) {
      line("the cuts are too fine for a picture; each rank's elements are");
      for (std::size_t i = 0; i < std::min(grid.tiles.size(), kMostTiles); ++i) line(grid.tiles[i]);
      if (grid.tiles.size() > kMostTiles) line(fmt::format("and those of {} more", grid.tiles.size() - kMostTiles));
      return;
    }
    if (grid.slices.empty()) line("no rank holds an element");
    for (const LayoutSlice& each : grid.slices) slice(grid, each);
    if (!grid.empty_ranks.empty()) line("no elements: rank " + ranks_text(grid.empty_ranks));
  }

  // Writes the text of a step beside an arrow.
  void step(const std::string& text) {
    const double x = kMargin + 8, end = y_ + 30;
    constexpr const char* kStroke = "stroke=\"#666\" stroke-width=\"2\"";
    svg_.line(x, y_ + 4, x, end, kStroke);
    svg_.line(x, end, x - 5, end - 7, kStroke);
    svg_.line(x, end, x + 5, end - 7, kStroke);
    svg_.text(x + 14, y_ + 21, text, "font-weight=\"bold\"");
    width_ = std::max(width_, x + 14 + 1.08 * text_width(text));
    y_ = end + 6;
  }

  std::string finish(const std::string& title) const { return svg_.finish(width_ + kMargin, y_ + kMargin, title); }

 private:
  void line(const std::string& text) {
    y_ += kLine;
    svg_.text(kMargin, y_ - 4, text);
    width_ = std::max(width_, kMargin + text_width(text));
  }

  void slice(const LayoutGrid& grid, const LayoutSlice& slice) {
    const std::size_t columns = grid.columns.size();
    if (!slice.text.empty()) line(slice.text);
    double label = 0;
    for (const Interval& row : grid.rows) {
      label = std::max(label, grid.row_dim < 0 ? 0 : text_width(interval_text(row)) + 8);
    }
    std::vector<double> least(columns, 24);
    for (std::size_t i = 0; i < slice.cells.size(); ++i) {
      double& width = least[i % columns];
      width = std::max(
          {width, text_width(slice.cells[i].text) + 12, text_width(interval_text(grid.columns[i % columns])) + 8});
    }
    const std::vector<double> widths = extents(grid.columns, kGridWidth, least);
    const std::vector<double> heights =
        extents(grid.rows, grid.row_dim < 0 ? 30 : kGridHeight, std::vector<double>(grid.rows.size(), 24));
    const double left = kMargin + label;
    if (grid.column_dim >= 0) {
      y_ += kLine;
      double x = left;
      for (std::size_t c = 0; c < columns; x += widths[c++])
        svg_.text(x + 2, y_ - 4, interval_text(grid.columns[c]), "fill=\"#666\"");
    }
    for (std::size_t r = 0; r < grid.rows.size(); y_ += heights[r++]) {
      if (grid.row_dim >= 0) svg_.text(kMargin, y_ + heights[r] / 2 + 4, interval_text(grid.rows[r]), "fill=\"#666\"");
      double x = left;
      for (std::size_t c = 0; c < columns; x += widths[c++])
        cell(slice.cells[r * columns + c], x, y_, widths[c], heights[r]);
      width_ = std::max(width_, x);
    }
    y_ += 6;
  }

  void cell(const LayoutCell& cell, double x, double y, double width, double height) {
    const std::size_t holders = cell.ranks.size();
    if (holders == 0 || holders > kMostStripes) {
      svg_.rect(x, y, width, height, "fill=\"#e8e8e8\"");
    } else {
      const double stripe = width / static_cast<double>(holders);
      for (std::size_t i = 0; i < holders; ++i) {
        svg_.rect(x + stripe * static_cast<double>(i), y, stripe, height,
                  fmt::format("fill=\"{}\"", svg_color(static_cast<std::size_t>(cell.ranks[i]))));
      }
    }
    svg_.rect(
        x, y, width, height,
        cell.pending ? "fill=\"none\" stroke=\"#222\" stroke-dasharray=\"4 3\"" : "fill=\"none\" stroke=\"#222\"");
    svg_.text(x + width / 2, y + height / 2 + 4, cell.text, "text-anchor=\"middle\"");
  }

  Svg svg_;
  double width_ = 0;
  double y_ = kMargin - 4;
};

}  // namespace

std::string layout_svg(const std::vector<LayoutGrid>& grids, const std::vector<std::string>& steps) {
  Drawing drawing;
  for (std::size_t i = 0; i < grids.size(); ++i) {
    drawing.layout(grids[i]);
    if (i < steps.size()) drawing.step(steps[i]);
  }
  if (grids.empty()) drawing.step("nothing to do");
  return drawing.finish(grids.size() < 2 ? "a layout" : "the layouts of a plan");
}

}  // namespace tessera
