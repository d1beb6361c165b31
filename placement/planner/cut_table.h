#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "tessera/placement/layout.h"
#include "tessera/placement/placement.h"

namespace tessera {

constexpr std::size_t kMostMeshDims = 12;  // of a mesh for which plans are made

// The ranks of a mesh that are compared when layouts are: all, or those at some coordinates of every mesh dimension.
struct ComparedRanks {
  explicit ComparedRanks(std::span<const int64_t> mesh_shape, const std::vector<std::set<int64_t>>& some = {});

  std::size_t count() const { return coordinates.size(); }
  // The rank at coordinate 0 of `mesh_dims`, a bit for each, and else where `rank` is. When all ranks are compared.
  std::size_t first_of_group(std::size_t rank, uint32_t mesh_dims) const;

  std::vector<int64_t> mesh_shape;
  std::vector<std::vector<int64_t>> coordinates;
  int64_t ranks = 1;  // of the mesh
  bool all = true;
};

// The ways in which layouts cut one tensor dimension: by which mesh dimensions, in which order, each as which
// Placement. A way has a number, given when it is first asked for; 0 is not to cut. Of two ways the table knows what
// ranks need of each other.
class CutTable {
 public:
  // `choices[i]` are the placements that mesh dimension i may have; both references must outlive the table.
  CutTable(int64_t tensor_dim, int64_t size, const ComparedRanks& ranks, const std::vector<Placements>& choices);

  // The way that cuts as `way` does and then by `mesh_dim` as its choice says.
  int extended(int way, std::size_t mesh_dim, std::size_t choice);
  bool is_legal(int way) const { return ways_[index(way)].legal; }
  // Whether it cuts into equal chunks, none of them empty.
  bool is_even(int way) const { return ways_[index(way)].even; }
  // The mesh dimensions that cut, in order.
  std::span<const uint8_t> sequence(int way) const { return {ways_[index(way)].dims.data(), ways_[index(way)].length}; }
  // Of a legal way: how many elements each compared rank has.
  const int64_t* sizes(int way) const { return &sizes_[index(way) * ranks_.count()]; }

  // Where chunks are equal and sizes powers of two, some bits of an element's place are its coordinate on a mesh
  // dimension that cuts: the first of them, the most significant being 0. -1 where it is not so.
  int first_bit(int way, std::size_t mesh_dim) const;

  // Numbers of two sampled ranks, whose coordinates differ in most mesh dimensions.
  using SampledCounts = std::array<int64_t, 2>;

  // Of two legal ways.
  struct Pair {
    uint32_t needs = 0;  // the fewest mesh dimensions along which ranks find what they need, a bit for each
    bool whole = false;  // all that is found there is needed
    bool known = false;
    SampledCounts common = {};  // elements that a rank has and needs
  };
  const Pair& pair(int from, int to);
  // Of two even ways: elements that the compared rank has and needs of which that is least, and whether all have as
  // many.
  struct Common {
    int64_t least = -1;
    bool alike = false;
  };
  const Common& least_common(int from, int to);
  // Elements that a rank has and another needs.
  int64_t common(int from, std::size_t sender, int to, std::size_t receiver) const {
    if (!ways_[index(from)].single || !ways_[index(to)].single) return overlap(part(from, sender), part(to, receiver));
    const std::size_t a = index(from) * ranks_.count() + sender;
    const std::size_t b = index(to) * ranks_.count() + receiver;
    const int64_t end = std::min(begins_[a] + sizes_[a], begins_[b] + sizes_[b]);
    return std::max<int64_t>(end - std::max(begins_[a], begins_[b]), 0);
  }
  // Multiplies the number for each compared rank by the elements that it has and needs.
  void multiply_common(int from, int to, int64_t* numbers) const;

 private:
  struct Way {
    std::array<uint8_t, kMostMeshDims> dims = {};
    std::array<uint8_t, kMostMeshDims> choices = {};
    uint8_t length = 0;
    uint32_t cutters = 0;  // dims as bits
    bool legal = true;
    bool even = true;                                   // chunks of equal size, not empty
    bool binary = true;                                 // by mesh dimensions whose sizes are powers of two
    bool single = true;                                 // every rank has one interval, from begins_ on
    std::vector<Intervals> intervals;                   // for each compared rank, when not single
    std::map<uint32_t, std::vector<Intervals>> merged;  // what the ranks along some of its dims have together
  };
  static std::size_t index(int way) { return static_cast<std::size_t>(way); }

  int add(int from, std::size_t mesh_dim, std::size_t choice);
  void cut_chunks(const Way& way, int from, int64_t parts);
  void cut_anyhow(Way& way);
  void take_parts(Way& way, const std::vector<Cut>& cuts);
  Pair find_pair(int from, int to);
  Pair even_pair(const Way& from, const Way& to) const;
  // The product of the sizes of the mesh dimensions that cut before `mesh_dim` does; 0 if it does not.
  int64_t parts_before(const Way& way, std::size_t mesh_dim) const;
  // Whether the ranks along `mesh_dims` hold together what each is to have; then whole is set.
  bool covers(int from, uint32_t mesh_dims, int to, bool& whole);
  const std::vector<Intervals>& merged(int way, uint32_t mesh_dims);
  Intervals part(int way, std::size_t rank) const;

  const int64_t tensor_dim_;
  const int64_t size_;
  const ComparedRanks& ranks_;
  const std::vector<Placements>& choices_;
  std::size_t fan_ = 1;  // most choices of a mesh dimension
  std::vector<Way> ways_;
  std::vector<int> extensions_;              // [way][mesh dim][choice]; 0: not known
  std::vector<int64_t> begins_;              // [way][compared rank]
  std::vector<int64_t> sizes_;               // [way][compared rank]
  std::vector<std::vector<Pair>> pairs_;     // [from][to], as far as asked for
  std::vector<std::vector<Common>> common_;  // the same
  std::vector<int64_t> each_common_;         // scratch, for each compared rank
};

}  // namespace tessera
