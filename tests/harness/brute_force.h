#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/core/ScalarType.h>

#include "tessera/mesh/mesh.h"
#include "tessera/placement/placement.h"
#include "tessera/placement/plan.h"
#include "tessera/placement/planner/cost_model.h"
#include "tessera/placement/planner/plan_redistribute.h"

namespace tessera::brute {

// Elements is a set of elements of one small tensor, by their row-major indexes.
constexpr std::size_t kMostElements = 512;
using Elements = std::bitset<kMostElements>;

// MeshDims is a set of mesh dimensions: bit i stands for mesh dimension i.
using MeshDims = uint32_t;
// Returns the mesh dimensions in `dims`, in order.
std::vector<int64_t> listed(MeshDims dims);

// Describes one step from a layout to another. The elements that each rank holds decide which kinds are possible:
//   local        every rank holds the elements of its target tile; where a Partial is formed, one of its ranks does;
//   all_to_all   every rank's target elements are held in its group (all_gather and permute are counted as this);
//   all_reduce, reduce_scatter   every rank holds a piece of all the elements of its target tile.
struct Step {
  PlanStep::Kind kind = PlanStep::Kind::kLocal;
  MeshDims over = 0;  // 0: no communication
  double bytes = 0;   // received by the rank that receives most
  // Bytes on the rank that has most: source tile, target tile, and twice what an all_to_all or once what a reduction
  // receives.
  double live = 0;
};

struct Leg {
  Placements from;
  Placements to;
  Step step;
  double microseconds = 0;
};
struct Optimum {
  double microseconds = 0;
  bool within_limit = true;  // false: every sequence of steps exceeds the limit of live bytes
  std::vector<Leg> legs;
};
std::string to_string(const Optimum& optimum);

// Finds the cheapest redistribution of one small tensor by exhaustion: it tries every layout that plan_redistribute's
// comment allows between the two, every step between two of them, and every set of mesh dimensions. It shares with the
// planner what a layout means (local_tile, normalize, check_layout, partials_commute, Reduction::slope) and what links
// cost (CostModel::microseconds). It caches layouts and steps, so that many pairs of layouts of one tensor are quick.
// Not thread-safe.
class BruteForce {
 public:
  // Throws std::invalid_argument for a tensor of more than kMostElements.
  BruteForce(std::vector<int64_t> shape, at::ScalarType dtype, Mesh mesh);

  // Returns the cheapest sequence of steps within live_limit(); if there is none, the cheapest of all.
  Optimum cheapest(const Placements& from, const Placements& to, const CostModel& model);

  // Returns how many bytes of its target tile a rank does not hold: for the rank that misses most, and summed over all.
  LowerBound missing(const Placements& from, const Placements& to);

  // Returns all single steps from `from` to `to`, each over a minimal set of mesh dimensions; {} if one step is not
  // enough.
  std::vector<Step> steps(const Placements& from, const Placements& to);

  // Returns what is wrong with the plan, or "": it does not lead from `from` to `to`, a step needs elements that its
  // groups do not hold, or a step states fewer received or live bytes than there are.
  std::string objection(const Plan& plan, const Placements& from, const Placements& to);

  // Returns, in bytes, max |source tile| + max |target tile| + twice the larger of the two.
  double live_limit(const Placements& from, const Placements& to);

 private:
  struct Layout {
    Placements placements;
    std::vector<Elements> held;  // what each rank holds
    // [set of mesh dims][rank]: what the ranks of its group hold together; within() fills it when it is needed.
    std::vector<std::vector<Elements>> within;
    MeshDims pending = 0;
    double largest = 0;  // the largest tile in bytes
  };
  struct Edge {
    int from, to;
    Step step;
  };
  struct Graph {
    Placements from, to;
    std::vector<int> layouts;  // `from` first
    int target = 0;
    std::vector<Edge> edges;         // between indexes in `layouts`; ordered by `from`
    std::vector<std::size_t> begin;  // for each layout the index of its first edge
    double limit = 0;
  };

  Elements elements_of(const std::vector<int64_t>& coordinate, const Placements& placements) const;
  int layout(const Placements& placements);  // -1 if the placements are not a valid layout
  const std::vector<Elements>& within(int layout, MeshDims over);
  const std::vector<Step>& steps(int from, int to);
  std::vector<Step> find_steps(int from, int to);
  bool move_is_legal(int from, int to, MeshDims over);
  double received(int from, int to) const;
  // Returns the bytes that ranks receive from ranks that differ from them along some of the mesh dimensions `slow`: the
  // mean over the ranks that agree along these, where it is largest.
  double received_across(int from, int to, const Step& step, MeshDims slow);
  double live(int from, int to, double extra_times) const;
  std::vector<Step> reductions(int from, int to, MeshDims over);
  std::vector<Placements> on_the_way(const Placements& from, const Placements& to) const;
  const Graph& graph(const Placements& from, const Placements& to);
  bool search(const Graph& graph, const CostModel& model, double limit, Optimum& out);

  std::vector<int64_t> shape_;
  double item_;
  Mesh mesh_;
  std::vector<std::vector<int64_t>> coordinates_;
  std::vector<std::vector<int>> group_;  // [set of mesh dims][rank]: the first rank of its group
  std::vector<Layout> layouts_;
  std::unordered_map<std::string, int> number_of_;
  std::unordered_map<uint64_t, std::vector<Step>> steps_;
  Graph graph_;
};

}  // namespace tessera::brute
