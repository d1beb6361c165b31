#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace tessera {

// Holds a mesh dimension as a caller gives it, by index or by name: 1, -1 or "tp".
struct MeshDim {
  template <typename Index>
  requires(std::is_integral_v<Index> || (std::is_enum_v<Index> && std::is_convertible_v<Index, int64_t>))
      MeshDim(Index index)
      : given(static_cast<int64_t>(index)) {}
  MeshDim(std::string name) : given(std::move(name)) {}
  MeshDim(const char* name) : given(std::string(name)) {}

  std::variant<int64_t, std::string> given;
};

// Holds mesh dimensions as a caller gives them, by index or by name: {0, 1} or {"dp", "tp"}.
struct MeshDims {
  MeshDims() : given(std::vector<int64_t>()) {}
  MeshDims(std::initializer_list<int64_t> indexes) : given(std::vector<int64_t>(indexes)) {}
  MeshDims(std::initializer_list<std::string> names) : given(std::vector<std::string>(names)) {}
  MeshDims(std::vector<int64_t> indexes) : given(std::move(indexes)) {}
  MeshDims(std::vector<std::string> names) : given(std::move(names)) {}
  // In {{"dp", "tp"}} the inner braces would make one string of two pointers.
  MeshDims(std::initializer_list<std::initializer_list<const char*>>) = delete;

  std::variant<std::vector<int64_t>, std::vector<std::string>> given;
};

// Names the ranks of one job as an n-dimensional grid, e.g. {dp: 2, tp: 4} over ranks 0..7.
//
// Invariants, checked once in the constructor and true for the object's life:
//   - every size is at least 1 and the product of shape() is ranks().size();
//   - names() is empty, or has one non-empty name per mesh dimension, all different;
//   - no rank is negative or appears twice.
// ranks() lists the global rank at each coordinate, the last mesh dimension varying fastest; any order of ranks and any
// subset of a world are legal.
//
// It is a value, compared by content, and any thread may read it. It does not communicate and owns no process group, so
// it can be built and tested in one process.
class Mesh {
 public:
  // The first form has ranks 0 .. product(shape)-1 in row-major order.
  // Throws std::invalid_argument when an invariant above does not hold.
  explicit Mesh(std::vector<int64_t> shape, std::vector<std::string> names = {});
  Mesh(std::vector<int64_t> shape, std::vector<std::string> names, std::vector<int64_t> ranks);

  const std::vector<int64_t>& shape() const { return shape_; }
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<int64_t>& ranks() const { return ranks_; }
  int64_t ndim() const { return static_cast<int64_t>(shape_.size()); }
  int64_t size() const { return static_cast<int64_t>(ranks_.size()); }

  // Returns the number of ranks along one mesh dimension; negative counts from the end. Throws std::invalid_argument
  // when out of range.
  int64_t size(int64_t mesh_dim) const;

  // Returns the index of the mesh dimension called `name`. If there is none, throws std::invalid_argument that lists
  // the mesh's names.
  int64_t mesh_dim(std::string_view name) const;
  // Returns `mesh_dim` as an index in [0, ndim); negative counts from the end. Throws std::invalid_argument when out of
  // range.
  int64_t normalize(int64_t mesh_dim) const;

  // Does the same for a mesh dimension that may be given by name, and throws like mesh_dim() then.
  int64_t index_of(const MeshDim& mesh_dim) const;

  // Does the same for several mesh dimensions, in the order given. Throws std::invalid_argument on a mesh dimension
  // that does not exist or is given twice.
  std::vector<int64_t> normalize(const MeshDims& mesh_dims) const;

  // Returns the coordinate of a global rank, or nullopt for a rank outside the mesh. Takes constant time where the
  // ranks go up in equal steps, as 0, 1, 2 and 1, 9, 17 do; else it searches them.
  std::optional<std::vector<int64_t>> coordinate_of(int64_t rank) const;

  // Returns the global ranks that share `coordinate` on every other mesh dimension, ordered by their coordinate on
  // `mesh_dim`.
  std::vector<int64_t> ranks_along(int64_t mesh_dim, const std::vector<int64_t>& coordinate) const;

  // Returns the global ranks that share `coordinate` on every mesh dimension except `mesh_dims`, the last of
  // `mesh_dims` varying fastest. Throws std::invalid_argument on a mesh dimension that is out of range or given twice.
  std::vector<int64_t> ranks_over(const MeshDims& mesh_dims, const std::vector<int64_t>& coordinate) const;

  // Returns the name of a mesh dimension, or its index as text in a mesh without names.
  std::string mesh_dim_name(int64_t mesh_dim) const;

  // Returns the 1-D mesh over `mesh_dims` that contains `coordinate`. Its ranks are ranks_over(): row-major over
  // `mesh_dims` in the order given. Its name is their names joined by '+'.
  //   {pp: 2, dp: 2, tp: 2}.merged({"dp", "tp"}, {1, 0, 0}) -> {dp+tp: 4} over ranks 4, 5, 6, 7
  //   {pp: 2, dp: 2, tp: 2}.merged({2, 1}, {1, 0, 0})       -> {tp+dp: 4} over ranks 4, 6, 5, 7
  //   {pp: 2, dp: 2, tp: 2}.merged({2}, {1, 0, 0})          -> {tp: 2} over ranks 4, 5
  //   (2, 2).merged({0, 1}, {0, 0})                         -> {0+1: 4}
  // A 1-D mesh returns itself. Throws like ranks_over(), and std::invalid_argument when `mesh_dims` is empty.
  Mesh merged(const MeshDims& mesh_dims, const std::vector<int64_t>& coordinate) const;

  // Returns the submesh over `names`, in that order, that contains `coordinate`; its coordinates on the other mesh
  // dimensions are fixed.
  //   {dp: 2, tp: 2}.slice({"tp"}, {1, 0}) -> {tp: 2} over ranks 2, 3
  // Throws std::invalid_argument on an unknown or repeated name, or a mesh without names.
  Mesh slice(const std::vector<std::string>& names, const std::vector<int64_t>& coordinate) const;

  // Returns this mesh with `mesh_dims` merged into one mesh dimension, row-major in the order given. It takes the
  // position of the leftmost of them; the others keep their order. When `name` is empty, its name is their names joined
  // by '+'.
  //   {pp: 2, dp: 2, tp: 2}.flatten({"dp", "tp"})   -> {pp: 2, dp+tp: 4}
  //   {pp: 2, dp: 2, tp: 2}.flatten({2, 0}, "edge") -> {edge: 4, dp: 2} over ranks 0, 2, 4, 6, 1, 3, 5, 7
  // Throws std::invalid_argument like normalize(), when `mesh_dims` is empty, when another mesh dimension has the name,
  // and when a mesh without names would get a name for only some of its mesh dimensions.
  Mesh flatten(const MeshDims& mesh_dims, const std::string& name = "") const;

  // Returns this mesh with one mesh dimension split into several, the last varying fastest, so ranks() stays the same.
  //   {world: 8}.unflatten("world", {2, 4}, {"dp", "tp"}) -> {dp: 2, tp: 4}
  // Throws std::invalid_argument when the product of `sizes` is not the mesh dimension's size, when there is not one
  // name per size, when another mesh dimension has a name, and when a mesh without names would get names for only some
  // of its mesh dimensions.
  Mesh unflatten(int64_t mesh_dim, const std::vector<int64_t>& sizes, const std::vector<std::string>& names = {}) const;
  Mesh unflatten(std::string_view name, const std::vector<int64_t>& sizes, const std::vector<std::string>& names) const;

  // Returns the mesh whose mesh dimensions are those of all `parts`, one part after the other. Each part is a mesh over
  // some of this mesh's ranks. All parts contain one common rank, and each extends along mesh dimensions of this mesh
  // along which no other part extends. The rank at (a, b) has the common rank's coordinate in this mesh, plus the
  // offset of part 0's rank at a from it, plus the offset of part 1's rank at b from it.
  //   with mesh = {pp: 2, dp: 2, tp: 2} and c = {1, 0, 0}:
  //   mesh.concatenate({mesh.slice({"tp"}, c), mesh.slice({"pp"}, c)}) -> {tp: 2, pp: 2} over ranks 0, 4, 1, 5
  //   mesh.concatenate({mesh.merged({0, 1}, c), mesh.slice({"tp"}, c)}) -> {pp+dp: 4, tp: 2}
  // Throws std::invalid_argument on parts that break these conditions, when a name appears twice, and when only some
  // parts have names. Source: PyTorch's DeviceMesh._concatenate, where each part refers to the mesh that it was sliced
  // from.
  Mesh concatenate(const std::vector<Mesh>& parts) const;

  // Returns "{dp: 2, tp: 4}", or "(2, 4)" without names. Ranks are shown when they are not 0 .. n-1 in order.
  std::string to_string() const;
  std::size_t hash() const { return hash_; }

  friend bool operator==(const Mesh& a, const Mesh& b) {
    return a.hash_ == b.hash_ && a.step_ == b.step_ && a.ranks_.front() == b.ranks_.front() && a.shape_ == b.shape_ &&
           a.names_ == b.names_ && (a.step_ != 0 || a.ranks_ == b.ranks_);
  }

 private:
  // Returns the index of a global rank in ranks().
  std::optional<int64_t> position_of(int64_t rank) const;

  std::vector<int64_t> shape_;
  std::vector<std::string> names_;
  std::vector<int64_t> ranks_;
  int64_t step_ = 0;  // ranks_[i] is ranks_[0] + i * step_; 0 if there is no such step
  std::size_t hash_ = 0;
};

std::ostream& operator<<(std::ostream& out, const Mesh& mesh);

}  // namespace tessera
