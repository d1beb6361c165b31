#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace tessera {

// `values` holds one value per mesh dimension. Returns them with those of `mesh_dims` (in range, at least one) removed
// and `with` inserted at the position of the leftmost:
//   replace_dims({a, b, c}, {2, 1}, {x}) -> {a, x}
template <typename T>
std::vector<T> replace_dims(const std::vector<T>& values, const std::vector<int64_t>& mesh_dims,
                            const std::vector<T>& with) {
  const int64_t leftmost = *std::min_element(mesh_dims.begin(), mesh_dims.end());
  std::vector<T> result;
  for (int64_t d = 0; d < static_cast<int64_t>(values.size()); ++d) {
    if (d == leftmost) result.insert(result.end(), with.begin(), with.end());
    const bool goes = std::find(mesh_dims.begin(), mesh_dims.end(), d) != mesh_dims.end();
    if (!goes) result.push_back(values[static_cast<std::size_t>(d)]);
  }
  return result;
}

}  // namespace tessera
