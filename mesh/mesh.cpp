#include "tessera/mesh/mesh.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <ostream>
#include <set>
#include <stdexcept>
#include <utility>

#include <c10/util/hash.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tessera {
namespace {

int64_t checked_product(const std::vector<int64_t>& shape) {
  int64_t product = 1;
  for (const int64_t size : shape) {
    if (size < 1) {
      throw std::invalid_argument(
          fmt::format("Mesh: shape ({}) has a size below 1; leave a mesh dimension out, or give it size 1",
                      fmt::join(shape, ", ")));
    }
    if (__builtin_mul_overflow(product, size, &product)) {
      throw std::invalid_argument(
          fmt::format("Mesh: the product of shape ({}) does not fit 64 bits", fmt::join(shape, ", ")));
    }
  }
  return product;
}

void check_names(const std::vector<int64_t>& shape, const std::vector<std::string>& names) {
  if (names.empty()) return;
  if (names.size() != shape.size()) {
    throw std::invalid_argument(
        fmt::format("Mesh: {} names ({}) for {} mesh dimensions; give one name per mesh dimension, or none",
                    names.size(), fmt::join(names, ", "), shape.size()));
  }
  std::set<std::string_view> seen;
  for (const std::string& name : names) {
    if (name.empty()) {
      throw std::invalid_argument("Mesh: a name is empty; name every mesh dimension, or none");
    }
    if (!seen.insert(name).second) {
      throw std::invalid_argument(fmt::format("Mesh: name '{}' appears twice in ({}); give each mesh dimension its own",
                                              name, fmt::join(names, ", ")));
    }
  }
}

// Returns the constant positive step between neighbouring `ranks`, or 0 if there is none or the first is negative. With
// a step no rank appears twice.
int64_t step_of(const std::vector<int64_t>& ranks) {
  if (ranks.front() < 0) return 0;
  if (ranks.size() == 1) return 1;
  for (std::size_t i = 1; i < ranks.size(); ++i) {
    if (ranks[i] <= ranks[i - 1] || ranks[i] - ranks[i - 1] != ranks[1] - ranks[0]) return 0;
  }
  return ranks[1] - ranks[0];
}

void check_count(const std::vector<int64_t>& shape, int64_t product, const std::vector<int64_t>& ranks) {
  if (static_cast<int64_t>(ranks.size()) != product) {
    throw std::invalid_argument(
        fmt::format("Mesh: shape ({}) needs {} ranks, {} were given", fmt::join(shape, ", "), product, ranks.size()));
  }
}

void check_distinct(const std::vector<int64_t>& ranks) {
  std::vector<int64_t> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  if (sorted.front() < 0) {
    throw std::invalid_argument(fmt::format("Mesh: rank {} is negative", sorted.front()));
  }
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    throw std::invalid_argument(fmt::format("Mesh: rank {} appears twice; a rank has one coordinate", *twice));
  }
}

std::vector<int64_t> first_ranks(int64_t count) {
  // A shape with more than 2^31 ranks is a typing error; listing its ranks could exhaust the memory.
  if (count > int64_t{1} << 31) {
    throw std::invalid_argument(fmt::format("Mesh: {} ranks are more than 2^31", count));
  }
  std::vector<int64_t> ranks(static_cast<std::size_t>(count));
  std::iota(ranks.begin(), ranks.end(), int64_t{0});
  return ranks;
}

std::size_t hash_of(const std::vector<int64_t>& shape, const std::vector<std::string>& names,
                    const std::vector<int64_t>& ranks, int64_t step) {
  std::size_t seed = shape.size();
  for (const int64_t size : shape) seed = c10::hash_combine(seed, std::hash<int64_t>{}(size));
  for (const std::string& name : names) seed = c10::hash_combine(seed, std::hash<std::string>{}(name));
  seed = c10::hash_combine(seed, std::hash<int64_t>{}(step));
  // If there is a step, the first rank and the step determine all ranks.
  const auto told = step == 0 ? ranks.end() : ranks.begin() + 1;
  for (auto rank = ranks.begin(); rank != told; ++rank) seed = c10::hash_combine(seed, std::hash<int64_t>{}(*rank));
  return seed;
}

// Returns, for each mesh dimension, the distance in ranks() between neighbours on it.
std::vector<int64_t> strides_of(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (std::size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * shape[d];
  return strides;
}

void check_coordinate(const Mesh& mesh, const std::vector<int64_t>& coordinate) {
  bool inside = coordinate.size() == mesh.shape().size();
  for (std::size_t d = 0; inside && d < coordinate.size(); ++d) {
    inside = coordinate[d] >= 0 && coordinate[d] < mesh.shape()[d];
  }
  if (!inside) {
    throw std::invalid_argument(
        fmt::format("Mesh: coordinate ({}) is outside mesh {}", fmt::join(coordinate, ", "), mesh.to_string()));
  }
}

// Returns the index of `coordinate` in ranks().
int64_t place_of(const std::vector<int64_t>& strides, const std::vector<int64_t>& coordinate) {
  return std::inner_product(coordinate.begin(), coordinate.end(), strides.begin(), int64_t{0});
}

}  // namespace

Mesh::Mesh(std::vector<int64_t> shape, std::vector<std::string> names)
    : shape_(std::move(shape)), names_(std::move(names)) {
  const int64_t product = checked_product(shape_);
  check_names(shape_, names_);
  ranks_ = first_ranks(product);
  step_ = 1;
  hash_ = hash_of(shape_, names_, ranks_, step_);
}

Mesh::Mesh(std::vector<int64_t> shape, std::vector<std::string> names, std::vector<int64_t> ranks)
    : shape_(std::move(shape)), names_(std::move(names)), ranks_(std::move(ranks)) {
  const int64_t product = checked_product(shape_);
  check_names(shape_, names_);
  check_count(shape_, product, ranks_);
  step_ = step_of(ranks_);
  if (step_ == 0) check_distinct(ranks_);
  hash_ = hash_of(shape_, names_, ranks_, step_);
}

int64_t Mesh::normalize(int64_t mesh_dim) const {
  const int64_t wrapped = mesh_dim < 0 ? mesh_dim + ndim() : mesh_dim;
  if (wrapped < 0 || wrapped >= ndim()) {
    throw std::invalid_argument(fmt::format("mesh dimension {} is out of range for mesh {} of {} mesh dimensions",
                                            mesh_dim, to_string(), ndim()));
  }
  return wrapped;
}

int64_t Mesh::size(int64_t mesh_dim) const { return shape_[static_cast<std::size_t>(normalize(mesh_dim))]; }

int64_t Mesh::mesh_dim(std::string_view name) const {
  const auto found = std::find(names_.begin(), names_.end(), name);
  if (found == names_.end()) {
    throw std::invalid_argument(
        names_.empty()
            ? fmt::format("mesh {} has no names; '{}' was asked for: pass the index, or name the mesh dimensions",
                          to_string(), name)
            : fmt::format("mesh {} has no mesh dimension '{}'; there are: {}", to_string(), name,
                          fmt::join(names_, ", ")));
  }
  return found - names_.begin();
}

int64_t Mesh::index_of(const MeshDim& mesh_dim) const {
  if (const auto* const name = std::get_if<std::string>(&mesh_dim.given)) return this->mesh_dim(*name);
  return normalize(std::get<int64_t>(mesh_dim.given));
}

std::vector<int64_t> Mesh::normalize(const MeshDims& mesh_dims) const {
  std::vector<int64_t> dims;
  const auto add = [&](int64_t d, const auto& given) {
    if (std::find(dims.begin(), dims.end(), d) != dims.end()) {
      throw std::invalid_argument(fmt::format("mesh dimension {} of mesh {} appears twice in ({}); give each once",
                                              mesh_dim_name(d), to_string(), fmt::join(given, ", ")));
    }
    dims.push_back(d);
  };
  if (const auto* const names = std::get_if<std::vector<std::string>>(&mesh_dims.given)) {
    for (const std::string& name : *names) add(mesh_dim(name), *names);
  } else {
    const auto& indexes = std::get<std::vector<int64_t>>(mesh_dims.given);
    for (const int64_t index : indexes) add(normalize(index), indexes);
  }
  return dims;
}

std::optional<int64_t> Mesh::position_of(int64_t rank) const {
  if (step_ == 0) {
    const auto found = std::find(ranks_.begin(), ranks_.end(), rank);
    return found == ranks_.end() ? std::nullopt : std::optional<int64_t>(found - ranks_.begin());
  }
  if (rank < ranks_.front() || rank > ranks_.back() || (rank - ranks_.front()) % step_ != 0) return std::nullopt;
  return (rank - ranks_.front()) / step_;
}

std::optional<std::vector<int64_t>> Mesh::coordinate_of(int64_t rank) const {
  const std::optional<int64_t> index = position_of(rank);
  if (!index.has_value()) return std::nullopt;
  int64_t rest = *index;
  std::vector<int64_t> coordinate(shape_.size());
  for (std::size_t d = shape_.size(); d-- > 0;) {
    coordinate[d] = rest % shape_[d];
    rest /= shape_[d];
  }
  return coordinate;
}

std::vector<int64_t> Mesh::ranks_along(int64_t mesh_dim, const std::vector<int64_t>& coordinate) const {
  return ranks_over({mesh_dim}, coordinate);
}

std::vector<int64_t> Mesh::ranks_over(const MeshDims& mesh_dims, const std::vector<int64_t>& coordinate) const {
  const std::vector<int64_t> dims = normalize(mesh_dims);
  check_coordinate(*this, coordinate);
  const std::vector<int64_t> strides = strides_of(shape_);
  std::vector<int64_t> origin = coordinate;
  for (const int64_t d : dims) origin[static_cast<std::size_t>(d)] = 0;
  std::vector<int64_t> indexes = {place_of(strides, origin)};
  // Each mesh dimension varies faster than those before it.
  for (const int64_t dim : dims) {
    const auto d = static_cast<std::size_t>(dim);
    std::vector<int64_t> next;
    next.reserve(indexes.size() * static_cast<std::size_t>(shape_[d]));
    for (const int64_t index : indexes) {
      for (int64_t i = 0; i < shape_[d]; ++i) next.push_back(index + i * strides[d]);
    }
    indexes = std::move(next);
  }
  for (int64_t& index : indexes) index = ranks_[static_cast<std::size_t>(index)];
  return indexes;
}

std::string Mesh::mesh_dim_name(int64_t mesh_dim) const {
  const int64_t d = normalize(mesh_dim);
  return names_.empty() ? std::to_string(d) : names_[static_cast<std::size_t>(d)];
}

Mesh Mesh::slice(const std::vector<std::string>& names, const std::vector<int64_t>& coordinate) const {
  if (names.empty()) {
    throw std::invalid_argument(fmt::format("slice of mesh {}: no names given", to_string()));
  }
  check_coordinate(*this, coordinate);
  check_names(std::vector<int64_t>(names.size()), names);
  std::vector<int64_t> mesh_dims;
  std::vector<int64_t> shape;
  for (const std::string& name : names) {
    mesh_dims.push_back(mesh_dim(name));
    shape.push_back(size(mesh_dims.back()));
  }
  return Mesh(std::move(shape), names, ranks_over(mesh_dims, coordinate));
}

std::string Mesh::to_string() const {
  std::string text = names_.empty() ? fmt::format("({}", fmt::join(shape_, ", ")) : "{";
  for (std::size_t d = 0; d < names_.size(); ++d) {
    text += fmt::format("{}{}: {}", d == 0 ? "" : ", ", names_[d], shape_[d]);
  }
  text += names_.empty() ? ")" : "}";
  if (ranks_.front() != 0 || step_ != 1) text += fmt::format(" over ranks [{}]", fmt::join(ranks_, ", "));
  return text;
}

std::ostream& operator<<(std::ostream& out, const Mesh& mesh) { return out << mesh.to_string(); }

}  // namespace tessera
