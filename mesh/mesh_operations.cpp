// Defines Mesh::merged, flatten, unflatten and concatenate, which make a mesh from others.
#include <algorithm>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/mesh/mesh.h"
#include "tessera/mesh/replace_dims.h"

namespace tessera {
namespace {

std::string joined_name(const Mesh& mesh, const std::vector<int64_t>& mesh_dims) {
  std::vector<std::string> names;
  names.reserve(mesh_dims.size());
  for (const int64_t d : mesh_dims) names.push_back(mesh.mesh_dim_name(d));
  return fmt::format("{}", fmt::join(names, "+"));
}

void check_some(const char* operation, const Mesh& mesh, const std::vector<int64_t>& mesh_dims) {
  if (!mesh_dims.empty()) return;
  throw std::invalid_argument(
      fmt::format("{}: no mesh dimensions of mesh {} were given; give one or more", operation, mesh.to_string()));
}

// Throws std::invalid_argument when `names` would name only some mesh dimensions of a mesh without names.
void check_nameable(const char* operation, const Mesh& mesh, bool others_left, const std::vector<std::string>& names) {
  if (names.empty() || !mesh.names().empty() || !others_left) return;
  throw std::invalid_argument(
      fmt::format("{}: mesh {} has no names, and ({}) would name only some of the mesh dimensions; "
                  "give no name, or name the mesh's dimensions when it is made",
                  operation, mesh.to_string(), fmt::join(names, ", ")));
}

void check_sizes(const Mesh& mesh, int64_t mesh_dim, const std::vector<int64_t>& sizes) {
  const int64_t size = mesh.size(mesh_dim);
  int64_t rest = size;
  bool fits = !sizes.empty();
  for (const int64_t part : sizes) {
    fits = fits && part >= 1 && rest % part == 0;
    if (fits) rest /= part;
  }
  if (fits && rest == 1) return;
  throw std::invalid_argument(
      fmt::format("unflatten: sizes ({}) do not make mesh dimension {} of mesh {}; give sizes whose product is {}",
                  fmt::join(sizes, ", "), mesh.mesh_dim_name(mesh_dim), mesh.to_string(), size));
}

void check_names(const Mesh& mesh, const std::vector<int64_t>& sizes, const std::vector<std::string>& names) {
  if (names.size() == sizes.size() || (names.empty() && mesh.names().empty())) return;
  throw std::invalid_argument(
      fmt::format("unflatten: {} names ({}) for {} sizes ({}) in mesh {}; give one name per size", names.size(),
                  fmt::join(names, ", "), sizes.size(), fmt::join(sizes, ", "), mesh.to_string()));
}

// ---- concatenate --------------------------------------------------------------------------------------------------

std::string list_of(const std::vector<Mesh>& meshes) {
  std::vector<std::string> texts;
  texts.reserve(meshes.size());
  for (const Mesh& mesh : meshes) texts.push_back(mesh.to_string());
  return fmt::format("{}", fmt::join(texts, " and "));
}

void check_parts(const Mesh& mesh, const std::vector<Mesh>& parts) {
  if (parts.empty()) {
    throw std::invalid_argument(fmt::format("concatenate: no parts of mesh {} were given", mesh.to_string()));
  }
  for (const Mesh& part : parts) {
    for (const int64_t rank : part.ranks()) {
      if (mesh.coordinate_of(rank).has_value()) continue;
      throw std::invalid_argument(
          fmt::format("concatenate: rank {} of {} is not in mesh {}; call it on the mesh that all "
                      "parts were cut from",
                      rank, part.to_string(), mesh.to_string()));
    }
    if (part.names().empty() != parts.front().names().empty()) {
      throw std::invalid_argument(
          fmt::format("concatenate: of {} some have names and some have none; name all, or none", list_of(parts)));
    }
  }
}

// Returns a rank that all parts contain.
int64_t common_rank(const std::vector<Mesh>& parts) {
  std::vector<int64_t> common = parts.front().ranks();
  std::sort(common.begin(), common.end());
  for (const Mesh& part : parts) {
    std::vector<int64_t> ranks = part.ranks();
    std::sort(ranks.begin(), ranks.end());
    std::vector<int64_t> both;
    std::set_intersection(common.begin(), common.end(), ranks.begin(), ranks.end(), std::back_inserter(both));
    common = std::move(both);
  }
  if (common.empty()) {
    throw std::invalid_argument(
        fmt::format("concatenate: {} have no rank in common; take slices through one coordinate", list_of(parts)));
  }
  return common.front();
}

// Returns, for each mesh dimension of `mesh`, whether `part` has a rank with another coordinate there than `from`.
std::vector<bool> extents(const Mesh& mesh, const Mesh& part, const std::vector<int64_t>& from) {
  std::vector<bool> extends(from.size(), false);
  for (const int64_t rank : part.ranks()) {
    const std::vector<int64_t> at = mesh.coordinate_of(rank).value();
    for (std::size_t d = 0; d < from.size(); ++d) extends[d] = extends[d] || at[d] != from[d];
  }
  return extends;
}

void check_apart(const Mesh& mesh, const std::vector<Mesh>& parts, const std::vector<int64_t>& from) {
  std::vector<const Mesh*> taken(from.size(), nullptr);
  for (const Mesh& part : parts) {
    const std::vector<bool> extends = extents(mesh, part, from);
    for (std::size_t d = 0; d < from.size(); ++d) {
      if (!extends[d]) continue;
      if (taken[d] != nullptr) {
        throw std::invalid_argument(fmt::format(
            "concatenate: {} and {} overlap: both extend along mesh dimension {} of mesh {}; give each to one part",
            taken[d]->to_string(), part.to_string(), mesh.mesh_dim_name(static_cast<int64_t>(d)), mesh.to_string()));
      }
      taken[d] = &part;
    }
  }
}

}  // namespace

Mesh Mesh::merged(const MeshDims& mesh_dims, const std::vector<int64_t>& coordinate) const {
  const std::vector<int64_t> dims = normalize(mesh_dims);
  check_some("merged", *this, dims);
  std::vector<int64_t> ranks = ranks_over(dims, coordinate);
  if (ndim() == 1) return *this;
  const auto size = static_cast<int64_t>(ranks.size());
  return Mesh({size}, {joined_name(*this, dims)}, std::move(ranks));
}

Mesh Mesh::flatten(const MeshDims& mesh_dims, const std::string& name) const {
  const std::vector<int64_t> dims = normalize(mesh_dims);
  check_some("flatten", *this, dims);
  std::vector<std::string> new_name;
  if (!name.empty()) new_name = {name};
  check_nameable("flatten", *this, static_cast<int64_t>(dims.size()) < ndim(), new_name);
  int64_t size = 1;
  for (const int64_t d : dims) size *= shape_[static_cast<std::size_t>(d)];
  std::vector<std::string> names = new_name;
  if (!names_.empty()) names = replace_dims(names_, dims, {name.empty() ? joined_name(*this, dims) : name});
  std::vector<int64_t> order(shape_.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  order = replace_dims(order, dims, dims);
  return Mesh(replace_dims(shape_, dims, {size}), std::move(names),
              ranks_over(order, std::vector<int64_t>(shape_.size(), 0)));
}

Mesh Mesh::unflatten(int64_t mesh_dim, const std::vector<int64_t>& sizes, const std::vector<std::string>& names) const {
  const int64_t d = normalize(mesh_dim);
  check_sizes(*this, d, sizes);
  check_names(*this, sizes, names);
  check_nameable("unflatten", *this, ndim() > 1, names);
  return Mesh(replace_dims(shape_, {d}, sizes), names_.empty() ? names : replace_dims(names_, {d}, names), ranks_);
}

Mesh Mesh::unflatten(std::string_view name, const std::vector<int64_t>& sizes,
                     const std::vector<std::string>& names) const {
  return unflatten(mesh_dim(name), sizes, names);
}

Mesh Mesh::concatenate(const std::vector<Mesh>& parts) const {
  check_parts(*this, parts);
  const int64_t common = common_rank(parts);
  check_apart(*this, parts, coordinate_of(common).value());
  const int64_t origin = position_of(common).value();
  std::vector<int64_t> shape;
  std::vector<std::string> names;
  std::vector<int64_t> indexes = {origin};
  for (const Mesh& part : parts) {
    shape.insert(shape.end(), part.shape_.begin(), part.shape_.end());
    names.insert(names.end(), part.names_.begin(), part.names_.end());
    std::vector<int64_t> next;
    for (const int64_t index : indexes) {
      for (const int64_t rank : part.ranks_) next.push_back(index + position_of(rank).value() - origin);
    }
    indexes = std::move(next);
  }
  for (int64_t& index : indexes) index = ranks_[static_cast<std::size_t>(index)];
  return Mesh(std::move(shape), std::move(names), std::move(indexes));
}

}  // namespace tessera
