#include "tessera/mesh/mesh.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <ostream>
#include <set>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tessera {
namespace {

int64_t checked_product(const std::vector<int64_t>& shape) {
  int64_t product = 1;
  for (const int64_t size : shape) {
    if (size < 1) {
      throw std::invalid_argument(fmt::format(
          "Mesh: shape ({}) has a size below 1; leave a mesh dimension out, or give it size 1", fmt::join(shape, ", ")));
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
        fmt::format("Mesh: {} names ({}) for {} mesh dimensions; give one name a mesh dimension, or none", names.size(),
                    fmt::join(names, ", "), shape.size()));
  }
  std::set<std::string_view> seen;
  for (const std::string& name : names) {
    if (name.empty()) {
      throw std::invalid_argument("Mesh: a name is empty; name every mesh dimension, or none");
    }
    if (!seen.insert(name).second) {
      throw std::invalid_argument(fmt::format("Mesh: name '{}' appears twice in ({})", name, fmt::join(names, ", ")));
    }
  }
}

void check_ranks(const std::vector<int64_t>& shape, int64_t product, const std::vector<int64_t>& ranks) {
  if (static_cast<int64_t>(ranks.size()) != product) {
    throw std::invalid_argument(
        fmt::format("Mesh: shape ({}) needs {} ranks, {} were given", fmt::join(shape, ", "), product, ranks.size()));
  }
  std::vector<int64_t> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  if (!sorted.empty() && sorted.front() < 0) {
    throw std::invalid_argument(fmt::format("Mesh: rank {} is negative", sorted.front()));
  }
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    throw std::invalid_argument(fmt::format("Mesh: rank {} appears twice; a rank has one coordinate", *twice));
  }
}

std::vector<int64_t> first_ranks(int64_t count) {
  // A product too large for memory is a mistyped shape; a mesh of more than 2^31 ranks does not exist.
  if (count > int64_t{1} << 31) {
    throw std::invalid_argument(fmt::format("Mesh: {} ranks are more than 2^31", count));
  }
  std::vector<int64_t> ranks(static_cast<std::size_t>(count));
  std::iota(ranks.begin(), ranks.end(), int64_t{0});
  return ranks;
}

void mix(std::size_t& seed, std::size_t value) { seed ^= value + 0x9e3779b97f4a7c15ULL + (seed << 6) + (seed >> 2); }

std::size_t hash_of(const std::vector<int64_t>& shape, const std::vector<std::string>& names,
                    const std::vector<int64_t>& ranks) {
  std::size_t seed = shape.size();
  for (const int64_t size : shape) mix(seed, std::hash<int64_t>{}(size));
  for (const std::string& name : names) mix(seed, std::hash<std::string>{}(name));
  for (const int64_t rank : ranks) mix(seed, std::hash<int64_t>{}(rank));
  return seed;
}

// How far apart in ranks() two neighbours on each mesh dimension stand.
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

// The index in ranks() of `coordinate`.
int64_t index_of(const std::vector<int64_t>& strides, const std::vector<int64_t>& coordinate) {
  return std::inner_product(coordinate.begin(), coordinate.end(), strides.begin(), int64_t{0});
}

// `mesh_dims` in [0, ndim), each given once.
std::vector<int64_t> distinct(const Mesh& mesh, const std::vector<int64_t>& mesh_dims) {
  std::vector<int64_t> dims;
  for (const int64_t mesh_dim : mesh_dims) {
    const int64_t d = mesh.normalize(mesh_dim);
    if (std::find(dims.begin(), dims.end(), d) != dims.end()) {
      throw std::invalid_argument(fmt::format("mesh dimension {} of mesh {} appears twice in ({}); give each once",
                                              mesh.mesh_dim_name(d), mesh.to_string(), fmt::join(mesh_dims, ", ")));
    }
    dims.push_back(d);
  }
  return dims;
}

}  // namespace

Mesh::Mesh(std::vector<int64_t> shape, std::vector<std::string> names) : shape_(std::move(shape)), names_(std::move(names)) {
  const int64_t product = checked_product(shape_);
  check_names(shape_, names_);
  ranks_ = first_ranks(product);
  hash_ = hash_of(shape_, names_, ranks_);
}

Mesh::Mesh(std::vector<int64_t> shape, std::vector<std::string> names, std::vector<int64_t> ranks)
    : shape_(std::move(shape)), names_(std::move(names)), ranks_(std::move(ranks)) {
  const int64_t product = checked_product(shape_);
  check_names(shape_, names_);
  check_ranks(shape_, product, ranks_);
  hash_ = hash_of(shape_, names_, ranks_);
}

int64_t Mesh::normalize(int64_t mesh_dim) const {
  const int64_t wrapped = mesh_dim < 0 ? mesh_dim + ndim() : mesh_dim;
  if (wrapped < 0 || wrapped >= ndim()) {
    throw std::invalid_argument(
        fmt::format("mesh dimension {} is out of range for mesh {} of {} mesh dimensions", mesh_dim, to_string(), ndim()));
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
            : fmt::format("mesh {} has no mesh dimension '{}'; there are: {}", to_string(), name, fmt::join(names_, ", ")));
  }
  return found - names_.begin();
}

std::optional<std::vector<int64_t>> Mesh::coordinate_of(int64_t rank) const {
  const auto found = std::find(ranks_.begin(), ranks_.end(), rank);
  if (found == ranks_.end()) return std::nullopt;
  int64_t rest = found - ranks_.begin();
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

std::vector<int64_t> Mesh::ranks_over(const std::vector<int64_t>& mesh_dims, const std::vector<int64_t>& coordinate) const {
  const std::vector<int64_t> dims = distinct(*this, mesh_dims);
  check_coordinate(*this, coordinate);
  const std::vector<int64_t> strides = strides_of(shape_);
  std::vector<int64_t> origin = coordinate;
  for (const int64_t d : dims) origin[static_cast<std::size_t>(d)] = 0;
  std::vector<int64_t> indexes = {index_of(strides, origin)};
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

Mesh Mesh::merged(const std::vector<int64_t>& mesh_dims, const std::vector<int64_t>& coordinate) const {
  if (mesh_dims.empty()) {
    throw std::invalid_argument(
        fmt::format("merged: no mesh dimensions of mesh {} were given; give one or more", to_string()));
  }
  std::vector<int64_t> ranks = ranks_over(mesh_dims, coordinate);
  if (ndim() == 1) return *this;
  std::vector<std::string> names;
  for (const int64_t d : mesh_dims) names.push_back(mesh_dim_name(d));
  const auto size = static_cast<int64_t>(ranks.size());
  return Mesh({size}, {fmt::format("{}", fmt::join(names, "+"))}, std::move(ranks));
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
  bool in_order = true;
  for (std::size_t i = 0; i < ranks_.size(); ++i) in_order = in_order && ranks_[i] == static_cast<int64_t>(i);
  if (!in_order) text += fmt::format(" over ranks [{}]", fmt::join(ranks_, ", "));
  return text;
}

std::ostream& operator<<(std::ostream& out, const Mesh& mesh) { return out << mesh.to_string(); }

}  // namespace tessera
