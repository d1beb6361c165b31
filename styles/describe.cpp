#include "tessera/styles/describe.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/styles/module_tree.h"

namespace tessera {
namespace {

DescriptionRow row_of(const ModuleNode& node, const NamedTensor& item) {
  const at::Tensor& t = item.tensor;
  const auto element = static_cast<int64_t>(t.element_size());
  DescriptionRow row{.path = node.path,
                     .type = node.type,
                     .parameter = item.name,
                     .is_parameter = item.is_parameter,
                     .global_shape = t.sizes().vec(),
                     .placements = {},
                     .mesh = {},
                     .local_shape = t.sizes().vec(),
                     .bytes_here = t.numel() * element,
                     .bytes_global = t.numel() * element,
                     .same_as = {}};
  if (is_dtensor(t)) {
    const Spec& spec = spec_of(t);
    row.placements = spec.placements;
    row.mesh = spec.mesh.to_string();
    row.local_shape = spec.local_sizes;
    row.bytes_here = spec.local_numel() * element;
  }
  return row;
}

using Cells = std::array<std::string, 7>;

std::string shape_text(const std::vector<int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

Cells cells_of(const DescriptionRow& row, bool show_mesh) {
  std::string placed = row.placements ? to_string(*row.placements) : "plain";
  if (show_mesh && row.placements) placed += " on " + row.mesh;
  return {row.path.empty() ? "(root)" : row.path,
          row.type,
          row.parameter,
          shape_text(row.global_shape),
          placed,
          shape_text(row.local_shape),
          row.same_as.empty() ? fmt::format("{}", row.bytes_here) : "= " + row.same_as};
}

std::string line_of(const Cells& cells, const std::array<std::size_t, 7>& widths) {
  std::string line;
  for (std::size_t i = 0; i + 1 < cells.size(); ++i) line += fmt::format("{:<{}}  ", cells[i], widths[i]);
  return line + fmt::format("{:>{}}\n", cells.back(), widths.back());
}

}  // namespace

int64_t Description::bytes_here() const {
  int64_t bytes = 0;
  for (const DescriptionRow& row : rows) bytes += row.bytes_here;
  return bytes;
}

int64_t Description::bytes_global() const {
  int64_t bytes = 0;
  for (const DescriptionRow& row : rows) bytes += row.bytes_global;
  return bytes;
}

Description describe(torch::nn::Module& module) {
  Description description;
  std::map<const void*, std::string> seen;
  for (const ModuleNode& node : tree_of(module)) {
    for (const NamedTensor& item : node.tensors) {
      DescriptionRow row = row_of(node, item);
      const auto [first, is_new] = seen.emplace(item.tensor.unsafeGetTensorImpl(), joined_path(node.path, item.name));
      if (!is_new) {
        row.same_as = first->second;
        row.bytes_here = row.bytes_global = 0;
      }
      description.rows.push_back(std::move(row));
    }
  }
  return description;
}

std::string to_string(const Description& description) {
  std::vector<Cells> lines = {{"path", "type", "parameter", "global shape", "placements", "local shape", "bytes here"}};
  std::set<std::string> meshes;
  for (const DescriptionRow& row : description.rows) {
    if (row.placements) meshes.insert(row.mesh);
  }
  for (const DescriptionRow& row : description.rows) lines.push_back(cells_of(row, meshes.size() > 1));
  std::array<std::size_t, 7> widths{};
  for (const Cells& cells : lines) {
    for (std::size_t i = 0; i < cells.size(); ++i) widths[i] = std::max(widths[i], cells[i].size());
  }
  std::string text;
  for (const Cells& cells : lines) text += line_of(cells, widths);
  return text + fmt::format("{} bytes here of {}\n", description.bytes_here(), description.bytes_global());
}

}  // namespace tessera
