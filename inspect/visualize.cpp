#include "tessera/inspect/visualize.h"

#include <algorithm>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/inspect/layout_grid.h"
#include "tessera/inspect/layout_svg.h"

namespace tessera {
namespace {

constexpr std::size_t kMostTiles = 64;

std::string interval_text(const Interval& interval) { return fmt::format("{}-{}", interval.begin, interval.end); }

std::string axes_text(const LayoutGrid& grid) {
  if (grid.row_dim >= 0) {
    return fmt::format("rows are tensor dimension {}, columns tensor dimension {}\n", grid.row_dim, grid.column_dim);
  }
  return grid.column_dim < 0 ? "" : fmt::format("columns are tensor dimension {}\n", grid.column_dim);
}

// The labels of rows and columns are left out where there is only one row or column, which no tensor dimension gives.
std::string slice_picture(const LayoutGrid& grid, const LayoutSlice& slice) {
  const std::size_t columns = grid.columns.size();
  std::size_t label = 0;
  for (const Interval& row : grid.rows) label = std::max(label, grid.row_dim < 0 ? 0 : interval_text(row).size());
  std::vector<std::size_t> widths(columns, 1);
  for (std::size_t c = 0; c < columns; ++c) {
    if (grid.column_dim >= 0) widths[c] = interval_text(grid.columns[c]).size();
    for (std::size_t r = 0; r < grid.rows.size(); ++r) {
      widths[c] = std::max(widths[c], slice.cells[r * columns + c].text.size());
    }
  }
  std::string rule = fmt::format("{:>{}} +", "", label);
  for (const std::size_t width : widths) rule += std::string(width + 2, '-') + "+";
  std::string text;
  if (grid.column_dim >= 0) {
    text += fmt::format("{:>{}}  ", "", label);
    for (std::size_t c = 0; c < columns; ++c)
      text += fmt::format(" {:<{}}  ", interval_text(grid.columns[c]), widths[c]);
    text.erase(text.find_last_not_of(' ') + 1);
    text += "\n";
  }
  text += rule + "\n";
  for (std::size_t r = 0; r < grid.rows.size(); ++r) {
    text += fmt::format("{:>{}} |", grid.row_dim < 0 ? "" : interval_text(grid.rows[r]), label);
    for (std::size_t c = 0; c < columns; ++c)
      text += fmt::format(" {:<{}} |", slice.cells[r * columns + c].text, widths[c]);
    text += "\n" + rule + "\n";
  }
  return text;
}

std::string tiles_text(const LayoutGrid& grid) {
  std::string text = "the cuts are too fine for a picture; each rank's elements along each tensor dimension are\n";
  const std::size_t shown = std::min(grid.tiles.size(), kMostTiles);
  for (std::size_t i = 0; i < shown; ++i) text += grid.tiles[i] + "\n";
  if (shown < grid.tiles.size()) text += fmt::format("and those of {} more ranks\n", grid.tiles.size() - shown);
  return text;
}

std::string picture(const LayoutGrid& grid) {
  std::string text = grid.title + "\n";
  if (grid.too_fine) return text + tiles_text(grid);
  if (grid.slices.empty()) return text + "no rank holds an element\n";
  text += axes_text(grid);
  for (const LayoutSlice& slice : grid.slices) {
    if (!slice.text.empty()) text += slice.text + "\n";
    text += slice_picture(grid, slice);
  }
  if (!grid.empty_ranks.empty()) text += fmt::format("no elements: rank {}\n", ranks_text(grid.empty_ranks));
  return text;
}

// Returns the lines of Plan::to_string, one per step.
std::vector<std::string> step_texts(const Plan& plan) {
  std::vector<std::string> lines;
  std::istringstream in(plan.to_string());
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// Returns the layouts before each step, and that after the last one.
std::vector<LayoutGrid> grids_of(const Plan& plan) {
  std::vector<LayoutGrid> grids;
  for (const PlanStep& step : plan.steps()) grids.push_back(layout_grid(plan.shape(), plan.mesh(), step.from));
  if (!plan.steps().empty()) grids.push_back(layout_grid(plan.shape(), plan.mesh(), plan.steps().back().to));
  return grids;
}

LayoutGrid grid_of(const at::Tensor& dtensor) {
  const Spec& spec = spec_of(dtensor);
  return layout_grid(spec.sizes, spec.mesh.mesh(), spec.placements);
}

}  // namespace

std::string visualize(const std::vector<int64_t>& shape, const Mesh& mesh, const Placements& placements) {
  return picture(layout_grid(shape, mesh, placements));
}
std::string visualize_svg(const std::vector<int64_t>& shape, const Mesh& mesh, const Placements& placements) {
  return layout_svg({layout_grid(shape, mesh, placements)}, {});
}

std::string visualize(const at::Tensor& dtensor) { return picture(grid_of(dtensor)); }
std::string visualize_svg(const at::Tensor& dtensor) { return layout_svg({grid_of(dtensor)}, {}); }

std::string visualize(const Plan& plan) {
  const std::vector<std::string> steps = step_texts(plan);
  const std::vector<LayoutGrid> grids = grids_of(plan);
  if (grids.empty()) return "nothing to do\n";
  std::string text = "before: " + picture(grids[0]);
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const std::string when = i + 1 == steps.size() ? "after" : fmt::format("after step {}", i + 1);
    text += fmt::format("\nstep {}: {}\n\n{}: {}", i + 1, steps[i], when, picture(grids[i + 1]));
  }
  return text;
}
std::string visualize_svg(const Plan& plan) { return layout_svg(grids_of(plan), step_texts(plan)); }

}  // namespace tessera
