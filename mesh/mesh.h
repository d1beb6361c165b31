#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace tessera {

// Mesh dimensions as a caller gives them, by index or by name: {0, 1} or {"dp", "tp"}.
struct MeshDims {
  MeshDims(std::initializer_list<int64_t> indexes) : given(std::vector<int64_t>(indexes)) {}
  MeshDims(std::initializer_list<std::string> names) : given(std::vector<std::string>(names)) {}
  MeshDims(std::vector<int64_t> indexes) : given(std::move(indexes)) {}
  MeshDims(std::vector<std::string> names) : given(std::move(names)) {}

  std::variant<std::vector<int64_t>, std::vector<std::string>> given;
};

// Names the ranks of one job as an n-dimensional grid, e.g. {dp: 2, tp: 4} over ranks 0..7.
//
// Invariants, checked once in the constructor and true for the object's life:
//   - every size is at least 1 and the product of shape() is ranks().size();
//   - names() is empty, or has one different, non-empty name a mesh dimension;
//   - no rank is negative or appears twice.
// ranks() lists the global rank at each coordinate, the last mesh dimension varying fastest; any order of ranks and any
// subset of a world is legal.
//
// A value: compared by content, safe to read from any thread. It does no communication and owns no process group, so it
// can be built and tested in one process.
class Mesh {
 public:
  // Ranks 0 .. product(shape)-1 in row-major order.
  // Throws std::invalid_argument when an invariant above does not hold.
  explicit Mesh(std::vector<int64_t> shape, std::vector<std::string> names = {});
  Mesh(std::vector<int64_t> shape, std::vector<std::string> names, std::vector<int64_t> ranks);

  const std::vector<int64_t>& shape() const { return shape_; }
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<int64_t>& ranks() const { return ranks_; }
  int64_t ndim() const { return static_cast<int64_t>(shape_.size()); }
  int64_t size() const { return static_cast<int64_t>(ranks_.size()); }

  // Ranks along one mesh dimension; negative counts from the end. Throws std::invalid_argument when out of range.
  int64_t size(int64_t mesh_dim) const;

  // Index of the mesh dimension called `name`. Throws std::invalid_argument that lists the names there are.
  int64_t mesh_dim(std::string_view name) const;
  // `mesh_dim` in [0, ndim); negative counts from the end. Throws std::invalid_argument when out of range.
  int64_t normalize(int64_t mesh_dim) const;

  // In [0, ndim), in the order given. Throws std::invalid_argument on one that is not there or is given twice.
  std::vector<int64_t> normalize(const MeshDims& mesh_dims) const;

  // The coordinate of a global rank, or nullopt for a rank outside the mesh. Looks through the ranks only where they do
  // not go up by one step, as 0, 1, 2 and 1, 9, 17 do.
  std::optional<std::vector<int64_t>> coordinate_of(int64_t rank) const;

  // The global ranks that share `coordinate` on every other mesh dimension, in the order of their coordinate on
  // `mesh_dim`.
  std::vector<int64_t> ranks_along(int64_t mesh_dim, const std::vector<int64_t>& coordinate) const;

  // The global ranks that share `coordinate` on every mesh dimension but `mesh_dims`, the last of `mesh_dims` varying
  // fastest. Throws std::invalid_argument on a mesh dimension that is out of range or given twice.
  std::vector<int64_t> ranks_over(const std::vector<int64_t>& mesh_dims, const std::vector<int64_t>& coordinate) const;

  // The name of a mesh dimension, or its index as text in a mesh without names.
  std::string mesh_dim_name(int64_t mesh_dim) const;

  // The mesh of one dimension over `mesh_dims` through `coordinate`: its ranks are ranks_over(), so the place on it is
  // row-major over the places on `mesh_dims` in the order given; its name is theirs joined by '+'.
  //   {pp: 2, dp: 2, tp: 2}.merged({1, 2}, {1, 0, 0}) -> {dp+tp: 4} over ranks 4, 5, 6, 7
  //   {pp: 2, dp: 2, tp: 2}.merged({2, 1}, {1, 0, 0}) -> {tp+dp: 4} over ranks 4, 6, 5, 7
  //   {pp: 2, dp: 2, tp: 2}.merged({2}, {1, 0, 0})    -> {tp: 2} over ranks 4, 5
  //   (2, 2).merged({0, 1}, {0, 0})                   -> {0+1: 4}
  // A mesh of one dimension is its own. Throws as ranks_over(), and when `mesh_dims` is empty.
  Mesh merged(const std::vector<int64_t>& mesh_dims, const std::vector<int64_t>& coordinate) const;

  // The mesh over `names`, in that order, through `coordinate` (its values on the other mesh dimensions stay fixed).
  //   {dp: 2, tp: 2}.slice({"tp"}, {1, 0}) -> {tp: 2} over ranks 2, 3
  // Throws std::invalid_argument on an unknown or repeated name, or a mesh without names.
  Mesh slice(const std::vector<std::string>& names, const std::vector<int64_t>& coordinate) const;

  // This mesh with `mesh_dims` merged into one, row-major in the order given. It stands where the leftmost of them
  // stood; the others keep their order. Its name is theirs joined by '+' when `name` is empty.
  //   {pp: 2, dp: 2, tp: 2}.flatten({"dp", "tp"})   -> {pp: 2, dp+tp: 4}
  //   {pp: 2, dp: 2, tp: 2}.flatten({2, 0}, "edge") -> {edge: 4, dp: 2} over ranks 0, 2, 4, 6, 1, 3, 5, 7
  // Throws std::invalid_argument as normalize(), on no mesh dimensions, on a name that another mesh dimension has, and
  // on one for a mesh without names of which others are left.
  Mesh flatten(const MeshDims& mesh_dims, const std::string& name = "") const;

  // This mesh with one mesh dimension split into several, the last varying fastest: the ranks stay in their order.
  //   {world: 8}.unflatten("world", {2, 4}, {"dp", "tp"}) -> {dp: 2, tp: 4}
  // Throws std::invalid_argument when the product of `sizes` is not the mesh dimension's size, on names that are not
  // one a size or that other mesh dimensions have, and on names for a mesh without names of which others are left.
  Mesh unflatten(int64_t mesh_dim, const std::vector<int64_t>& sizes, const std::vector<std::string>& names = {}) const;
  Mesh unflatten(std::string_view name, const std::vector<int64_t>& sizes, const std::vector<std::string>& names) const;

  // The mesh whose mesh dimensions are those of all `parts`, one part after the other. A part is a mesh over some of
  // this one's ranks; all go through one rank, and each along mesh dimensions of this mesh on which no other extends.
  // The rank at (a, b) is the one that is as far from that rank as part 0's at a and part 1's at b together.
  //   with mesh = {pp: 2, dp: 2, tp: 2} and c = {1, 0, 0}:
  //   mesh.concatenate({mesh.slice({"tp"}, c), mesh.slice({"pp"}, c)}) -> {tp: 2, pp: 2} over ranks 0, 4, 1, 5
  //   mesh.concatenate({mesh.merged({0, 1}, c), mesh.slice({"tp"}, c)}) -> {pp+dp: 4, tp: 2}
  // Throws std::invalid_argument on parts that are not so, on names that appear twice, and where only some have names.
  // Source: PyTorch's DeviceMesh._concatenate, where each part knows the mesh that it was cut from.
  Mesh concatenate(const std::vector<Mesh>& parts) const;

  // "{dp: 2, tp: 4}", or "(2, 4)" without names; ranks are shown when they are not 0 .. n-1 in order.
  std::string to_string() const;
  std::size_t hash() const { return hash_; }

  friend bool operator==(const Mesh& a, const Mesh& b) {
    return a.hash_ == b.hash_ && a.step_ == b.step_ && a.ranks_.front() == b.ranks_.front() && a.shape_ == b.shape_ &&
           a.names_ == b.names_ && (a.step_ != 0 || a.ranks_ == b.ranks_);
  }

 private:
  // The place of a global rank in ranks().
  std::optional<int64_t> index_of(int64_t rank) const;

  std::vector<int64_t> shape_;
  std::vector<std::string> names_;
  std::vector<int64_t> ranks_;
  int64_t step_ = 0;  // ranks_[i] is ranks_[0] + i * step_; 0 where that does not hold
  std::size_t hash_ = 0;
};

std::ostream& operator<<(std::ostream& out, const Mesh& mesh);

}  // namespace tessera
