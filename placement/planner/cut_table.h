#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "tessera/placement/layout.h"
#include "tessera/placement/placement.h"
#include "tessera/placement/planner/compared_ranks.h"

namespace tessera {

// Numbers the ways to cut one tensor dimension in the layouts of a search. A way is a sequence of mesh dimensions, in
// the order in which they cut, with the Placement of each. A way gets its number when it is first asked for; way 0 does
// not cut. For a pair of ways the table computes once, and keeps, what ranks need of each other.
//
// Invariants:
//   - A way keeps its number; ways are added by extended() alone, and none is removed.
//   - begins_ and sizes_ have an entry for each way and compared rank, extensions_ for each way, mesh dimension and
//     choice.
// extended() may move the memory to which sizes() and sequence() point.
class CutTable {
 public:
  // `choices[i]` are the placements that mesh dimension i may have. The table keeps references to `ranks` and
  // `choices`, which must outlive it.
  CutTable(int64_t tensor_dim, int64_t size, const ComparedRanks& ranks, const std::vector<Placements>& choices);

  // Returns the way that cuts first as `way` does and then by `mesh_dim` with the placement choices[mesh_dim][choice].
  int extended(int way, std::size_t mesh_dim, std::size_t choice);
  bool is_legal(int way) const { return ways_[index(way)].legal; }
  // Returns whether it cuts into chunks of equal size, none of them empty.
  bool is_even(int way) const { return ways_[index(way)].even; }
  // Returns the mesh dimensions that cut, in order.
  std::span<const uint8_t> sequence(int way) const { return {ways_[index(way)].dims.data(), ways_[index(way)].length}; }
  // Returns how many elements each compared rank has. The way must be legal.
  const int64_t* sizes(int way) const { return &sizes_[index(way) * ranks_.count()]; }

  // Returns -1 unless `mesh_dim` cuts, chunks are equal and the mesh dimensions that cut have powers of two as sizes.
  // Otherwise the coordinate on a mesh dimension that cuts is some consecutive bits of an element's index, and this is
  // the number of the first of them, the most significant bit being 0.
  int first_bit(int way, std::size_t mesh_dim) const;

  // Holds a number for each of two sampled ranks, whose coordinates differ in most mesh dimensions.
  using SampledCounts = std::array<int64_t, 2>;

  // Compares two legal ways.
  struct Pair {
    uint32_t needs = 0;  // the fewest mesh dimensions along which ranks find what they need, a bit for each
    bool whole = false;  // ranks need everything that is found there
    bool known = false;
    SampledCounts already_held = {};  // elements that each sampled rank has and needs
  };
  const Pair& pair(int from, int to);
  // Compares two even ways: holds the number of elements that a compared rank has and needs, for the rank where it is
  // least, and whether it is the same for all.
  struct LeastHeld {
    int64_t least = -1;
    bool alike = false;
  };
  const LeastHeld& least_held(int from, int to);
  // Returns the number of elements that `holder` has under `from` and `needer` needs under `to`. The two may be one
  // rank.
  int64_t held_for(int from, std::size_t holder, int to, std::size_t needer) const {
    if (!ways_[index(from)].single || !ways_[index(to)].single) return overlap(part(from, holder), part(to, needer));
    const std::size_t a = index(from) * ranks_.count() + holder;
    const std::size_t b = index(to) * ranks_.count() + needer;
    const int64_t end = std::min(begins_[a] + sizes_[a], begins_[b] + sizes_[b]);
    return std::max<int64_t>(end - std::max(begins_[a], begins_[b]), 0);
  }
  // Multiplies the number of each compared rank by the number of elements that it has and needs.
  void multiply_already_held(int from, int to, int64_t* numbers) const;
  // Multiplies the number of each group of ranks along `mesh_dims` by the number of elements that its ranks have under
  // `from` and need under `to`, each counted once. The groups are in the order of their first ranks.
  void multiply_held_by_groups(int from, int to, uint32_t mesh_dims, std::vector<int64_t>& numbers);

 private:
  // Holds what the ranks of each of some groups have together, in the order of their first ranks.
  struct Groups {
    std::vector<int64_t> begins, sizes;
    std::vector<Intervals> intervals;  // empty if each group has one interval at most

    Intervals of(std::size_t group) const {
      return intervals.empty() ? one_interval(begins[group], begins[group] + sizes[group]) : intervals[group];
    }
  };
  struct Way {
    std::array<uint8_t, kMostMeshDims> dims = {};
    std::array<uint8_t, kMostMeshDims> choices = {};
    uint8_t length = 0;
    uint32_t cutters = 0;  // dims as bits
    int shorter = 0;       // the way without the last cut
    bool legal = true;
    bool even = true;                  // chunks of equal size, not empty
    bool binary = true;                // by mesh dimensions whose sizes are powers of two
    bool single = true;                // every rank has one interval, which starts at begins_
    std::vector<Intervals> intervals;  // for each compared rank, when not single
    // Maps some of its mesh dimensions to what the ranks along these hold together.
    std::map<uint32_t, std::vector<Intervals>> merged;
    std::map<uint32_t, Groups> groups;  // by mesh dimensions
  };
  static std::size_t index(int way) { return static_cast<std::size_t>(way); }

  int add(int from, std::size_t mesh_dim, std::size_t choice);
  Placements placements_of(const Way& way) const;
  void cut_chunks(const Way& way, int from, int64_t parts);
  void cut_anyhow(Way& way);
  void take_parts(Way& way, const std::vector<Cut>& cuts);
  Pair find_pair(int from, int to);
  Pair even_pair(const Way& from, const Way& to) const;
  // Returns the product of the sizes of the mesh dimensions that cut before `mesh_dim` does, or 0 if it does not cut.
  int64_t parts_before(const Way& way, std::size_t mesh_dim) const;
  // Says whether the ranks along `mesh_dims` together hold what each of them needs. If so, sets `whole`.
  bool covers(int from, uint32_t mesh_dims, int to, bool& whole);
  // Returns what the ranks along `mesh_dims` hold together, for the first rank of every group of those that agree in
  // the other mesh dimensions that cut. All ranks must be compared.
  const std::vector<Intervals>& merged(int way, uint32_t mesh_dims);
  // Returns what the ranks along `mesh_dims` hold together.
  const Groups& groups(int way, uint32_t mesh_dims);
  Groups find_groups(int way, uint32_t mesh_dims) const;
  // Returns what the ranks of one group hold together. `mesh_dims` must cut, and `cuts` are the way's.
  Intervals part_of_group(int way, const std::vector<Cut>& cuts, std::size_t first, uint32_t mesh_dims) const;
  Intervals part(int way, std::size_t rank) const;

  const int64_t tensor_dim_;
  const int64_t size_;
  const ComparedRanks& ranks_;
  const std::vector<Placements>& choices_;
  std::size_t fan_ = 1;  // the largest number of choices of a mesh dimension
  std::vector<Way> ways_;
  std::vector<int> extensions_;                     // [way][mesh dim][choice]; 0: not computed
  std::vector<int64_t> begins_;                     // [way][compared rank]
  std::vector<int64_t> sizes_;                      // [way][compared rank]
  std::vector<std::vector<Pair>> pairs_;            // [from][to], for the pairs that were asked for
  std::vector<std::vector<LeastHeld>> least_held_;  // likewise
  std::vector<int64_t> each_held_;                  // scratch memory, one number per compared rank
};

}  // namespace tessera
