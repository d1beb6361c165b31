#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "tessera/placement/cost_model.h"
#include "tessera/placement/plan.h"

namespace tessera {

// One step between two layouts and what it costs.
struct Edge {
  PlanStep::Kind kind = PlanStep::Kind::kLocal;
  uint32_t mesh_dims = 0;  // a bit for each
  double bytes = 0;        // received by the rank that receives most
  double peak = 0;         // live at the rank that has most
  double microseconds = 0;
};

// The layouts that a plan may pass through and the steps between them, with their costs: the graph that the planner searches.
// Ranks are compared one by one on a mesh of up to 64; on a larger one those at the first, second and last coordinates are, and a
// step is legal where the order of cuts says so. Made for one search; not thread-safe.
class PlanSpace {
 public:
  // A layout, by number.
  using Node = int32_t;

  // `from` and `to` are normalized; in the place of masked reductions stand those that they await.
  PlanSpace(std::span<const int64_t> shape, int64_t element_size, std::span<const int64_t> mesh_shape,
            const Placements& from, const Placements& to, const CostModel& model);

  Node from() const { return from_; }
  Node to() const { return to_; }
  Node size() const { return size_; }  // nodes are [0, size)
  Placements placements_of(Node node) const;

  // The step from one layout to another, if one does it.
  std::optional<Edge> edge(Node from, Node to);
  // What every way from `node` to the target costs at least; infinite where the layout is no legal one.
  double bound(Node node);
  // Bytes that a plan may have live: source and target tile, and twice the larger.
  double memory_limit();
  // The mesh dimensions over which a step that moves elements is run: its own, and those along which copies of them lie where
  // these, by sharing in the sending, leave less of it to the rank that sends most, at no cost.
  uint32_t shared(Node from, Node to, uint32_t mesh_dims);
  // Whether in such a step every tile comes whole from one rank, and no rank sends to more than one. Known of meshes of up to 64 ranks.
  bool permutes(Node from, Node to, uint32_t mesh_dims);

 private:
  // A tensor dimension as some layouts cut it.
  struct Parts {
    std::vector<int64_t> sequence;  // the mesh dimensions that cut it, in order
    uint32_t cutters = 0;           // the same as bits
    std::vector<Intervals> at;      // for each compared rank
    std::vector<int64_t> sizes;
    bool legal = true;
    std::map<uint32_t, std::vector<Intervals>> merged;  // what the ranks along some of its cutters have together
  };
  // Of two ways to cut a tensor dimension: what ranks need of others to go from one to the other.
  struct Pair {
    bool known = false;
    bool whole = false;           // all that those have is needed
    uint32_t needs = 0;           // the fewest mesh dimensions along which they are found
    std::vector<int64_t> common;  // elements that a rank has and needs, for each compared rank
  };
  // A layout, looked at.
  struct Info {
    std::vector<int> parts;      // for each tensor dimension; none before it was looked at
    std::vector<int64_t> numel;  // for each compared rank
    int64_t largest = 0;
    bool looked_at = false;
    bool legal = true;
    double bound = -1;  // not known
  };
  struct Missing {
    int64_t most = 0;  // elements that a rank lacks
    int64_t live = 0;  // elements of both tiles and twice what a rank lacks
  };

  std::size_t ndim() const { return mesh_shape_.size(); }
  std::size_t choice(Node node, std::size_t mesh_dim) const {
    return static_cast<std::size_t>(node / strides_[mesh_dim]) % candidates_[mesh_dim].size();
  }
  const Placement& placement(Node node, std::size_t mesh_dim) const { return candidates_[mesh_dim][choice(node, mesh_dim)]; }

  void make_candidates(const Placements& from, const Placements& to);
  void make_ranks();
  Node number_of(const Placements& placements) const;
  const Info& info(Node node);
  bool in_normal_order(const Info& info, Node node) const;
  int parts_of(std::size_t tensor_dim, Node node);
  Parts cut(std::size_t tensor_dim, const Placements& placements) const;
  const Pair& pair(std::size_t tensor_dim, int from, int to);
  bool covers(std::size_t tensor_dim, int from, uint32_t mesh_dims, int to, bool& whole);
  const std::vector<Intervals>& merged(std::size_t tensor_dim, int parts, uint32_t mesh_dims);
  Missing missing(Node from, Node to);
  uint32_t needs(Node from, Node to, bool& whole);
  double find_bound(Node node);
  double reduction_bound(double terms);

  struct Changes;
  Changes changes(Node from, Node to) const;
  // Bytes live at most where a rank receives `received` times its target tile.
  double live(Node from, Node to, double received);
  std::optional<Edge> reduction(Node from, Node to, const Changes& changes);
  Edge move(Node from, Node to, const Changes& changes, uint32_t needs, bool whole);
  // Elements that one rank has and another needs.
  int64_t common(const Info& from, std::size_t sender, const Info& to, std::size_t receiver) const;
  // Calls visit(sender, receiver, elements) for what exchange_of would have them send, by the places of ranks_.
  template <typename Visit>
  void for_each_message(Node from, Node to, uint32_t mesh_dims, const Visit& visit);
  // Elements that the rank that sends most sends, when the copies along `mesh_dims` share it.
  int64_t most_sent(Node from, Node to, uint32_t mesh_dims);
  // Whether two ranks are in one group over `mesh_dims` and hold different tiles.
  bool asks(Node from, std::size_t sender, std::size_t receiver, uint32_t mesh_dims) const;
  Edge priced(PlanStep::Kind kind, uint32_t mesh_dims, double elements) const;
  Link slowest(uint32_t mesh_dims) const;
  int64_t ranks_of(uint32_t mesh_dims) const;

  const std::vector<int64_t> shape_;
  const double element_size_;
  const std::vector<int64_t> mesh_shape_;
  const CostModel model_;
  double least_latency_ = 0;
  double most_bandwidth_ = 0;
  int64_t all_ranks_ = 1;
  std::vector<Placements> candidates_;       // for each mesh dimension
  std::vector<Node> strides_;                // of the choices in a node's number
  std::vector<std::vector<int64_t>> ranks_;  // coordinates that are compared
  bool ordered_ = false;                     // some candidate has an order
  bool pending_ = false;                     // some are Partial
  Node size_ = 1;
  Node from_ = 0;
  Node to_ = 0;
  std::vector<Info> infos_;
  std::vector<std::vector<Parts>> parts_;  // [tensor dim]
  std::vector<std::unordered_map<Node, int>>
      parts_numbers_;                                  // by the node with all that does not cut it replaced by choice 0
  std::vector<std::vector<std::vector<Pair>>> pairs_;  // [tensor dim][from][to]
};

}  // namespace tessera
