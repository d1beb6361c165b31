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

// A set of elements of one small tensor, by their row-major numbers.
constexpr std::size_t kMostElements = 512;
using Elements = std::bitset<kMostElements>;

// A set of mesh dimensions: bit i stands for dimension i.
using MeshDims = uint32_t;
std::vector<int64_t> listed(MeshDims dims);

// One step from a layout to another, decided by the elements that every rank holds:
//   local        every rank holds the elements of its target tile; where a Partial is formed, one of its ranks does;
//   all_to_all   every rank's target elements are held in its group (all_gather and permute are counted as this);
//   all_reduce, reduce_scatter   every rank holds a piece of all the elements of its target tile.
struct Step {
  PlanStep::Kind kind = PlanStep::Kind::kLocal;
  MeshDims over = 0;  // 0: no communication
  double bytes = 0;   // received by the rank that receives most
  double live =
      0;  // bytes, in the rank that has most: source, target, twice what a move and once what a reduction receives
};

struct Leg {
  Placements from;
  Placements to;
  Step step;
  double microseconds = 0;
};
struct Optimum {
  double microseconds = 0;
  bool within_limit = true;  // of live bytes; if not, no sequence of steps is
  std::vector<Leg> legs;
};
std::string to_string(const Optimum& optimum);

// The cheapest redistribution of one small tensor, found by trying all: every layout that plan_redistribute's comment
// allows on the way, every step between two of them, every set of mesh dimensions. With the planner it shares what a
// layout means (local_tile, normalize, check_layout, partials_commute, Reduction::slope) and what a link costs
// (CostModel::over). It remembers layouts and steps, so that many pairs of one tensor are quick; not thread-safe.
class BruteForce {
 public:
  // Throws std::invalid_argument for a tensor of more than kMostElements.
  BruteForce(std::vector<int64_t> shape, at::ScalarType dtype, Mesh mesh);

  Optimum cheapest(const Placements& from, const Placements& to, const CostModel& model);

  // The bytes of its target tile that a rank lacks: of the rank that lacks most, and of all.
  LowerBound missing(const Placements& from, const Placements& to);

  // All single steps, each over a smallest set of mesh dimensions; {} when it takes more than one.
  std::vector<Step> steps(const Placements& from, const Placements& to);

  // What is wrong with the plan: it does not lead from `from` to `to`, a step needs elements that its groups do not
  // hold, or says that less is received or live than is. "" when nothing is.
  std::string objection(const Plan& plan, const Placements& from, const Placements& to);

  // max |source tile| + max |target tile| + twice the larger of the two.
  double live_limit(const Placements& from, const Placements& to);

 private:
  struct Layout {
    Placements placements;
    std::vector<Elements> held;  // by each rank
    std::vector<std::vector<Elements>>
        within;  // [set of mesh dims][rank]: by its group together; filled when asked for
    MeshDims pending = 0;
    double largest = 0;  // tile, in bytes
  };
  struct Edge {
    int from, to;
    Step step;
  };
  struct Graph {
    Placements from, to;
    std::vector<int> layouts;  // `from` first
    int target = 0;
    std::vector<Edge> edges;         // by places in `layouts`, those from one layout together
    std::vector<std::size_t> begin;  // where each layout's begin
    double limit = 0;
  };

  Elements elements_of(const std::vector<int64_t>& coordinate, const Placements& placements) const;
  int layout(const Placements& placements);  // -1: cannot be
  const std::vector<Elements>& within(int layout, MeshDims over);
  const std::vector<Step>& steps(int from, int to);
  std::vector<Step> find_steps(int from, int to);
  bool move_is_legal(int from, int to, MeshDims over);
  double received(int from, int to) const;
  double live(int from, int to, double extra_times) const;
  std::vector<Step> reductions(int from, int to, MeshDims over);
  std::vector<Placements> on_the_way(const Placements& from, const Placements& to) const;
  const Graph& graph(const Placements& from, const Placements& to);
  bool search(const Graph& graph, const CostModel& model, double limit, Optimum& out) const;

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
