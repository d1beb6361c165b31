#include "tessera/placement/planner/step_groups.h"

#include <algorithm>
#include <vector>

namespace tessera {
namespace {

using Node = LayoutSpace::Node;

uint32_t bit(std::size_t mesh_dim) { return uint32_t{1} << mesh_dim; }

// Says whether the mesh is too large to compare every rank with every other. Only on such a mesh a space compares some
// ranks, so otherwise all are known.
bool is_large(const LayoutSpace& space) { return space.counts().ranks().ranks > kCompareAll; }

// Lists the messages of a step that moves elements, rank by rank.
class Messages {
 public:
  Messages(const LayoutSpace& space, Node from, Node to, uint32_t mesh_dims)
      : space_(space), from_(from), to_(to), mesh_dims_(mesh_dims), sharded_(space.sharded(from)) {
    for (std::size_t r = 0; r < space.counts().ranks().count(); ++r) {
      copies_of_.push_back(space.counts().ranks().first_of_group(r, mesh_dims & ~sharded_));
    }
  }

  // Calls visit(sender, receiver, elements) for each message of exchange_of.
  template <typename Visit>
  void for_each(const Visit& visit) const {
    const int64_t copies = space_.counts().ranks().ranks_of(mesh_dims_ & ~sharded_);
    for (std::size_t sender = 0; sender < copies_of_.size(); ++sender) {
      const std::size_t group = space_.counts().ranks().first_of_group(sender, mesh_dims_);
      const int64_t mine = copy_number(sender);
      int64_t turn = 0;
      for (std::size_t receiver = 0; receiver < copies_of_.size(); ++receiver) {
        if (copies_of_[sender] == copies_of_[receiver]) continue;  // they hold the same tile
        if (space_.counts().ranks().first_of_group(receiver, mesh_dims_) != group) continue;
        const int64_t needed = space_.counts().held_for(from_, sender, to_, receiver);
        if (needed > 0 && turn++ % copies == mine) visit(sender, receiver, needed);
      }
    }
  }

 private:
  // Returns the rank's number among those that hold the same tile.
  int64_t copy_number(std::size_t rank) const {
    int64_t out = 0;
    for (std::size_t i = 0; i < space_.counts().ranks().mesh_shape.size(); ++i) {
      if ((mesh_dims_ & ~sharded_ & bit(i)) == 0) continue;
      out = out * space_.counts().ranks().mesh_shape[i] + space_.counts().ranks().coordinates[rank][i];
    }
    return out;
  }

  const LayoutSpace& space_;
  const Node from_, to_;
  const uint32_t mesh_dims_;
  const uint32_t sharded_;
  std::vector<std::size_t> copies_of_;  // [rank]: the first rank that holds the same tile
};

// Returns the number of elements that the rank that sends most sends.
int64_t most_sent(const LayoutSpace& space, Node from, Node to, uint32_t mesh_dims) {
  std::vector<int64_t> sent(space.counts().ranks().count(), 0);
  Messages(space, from, to, mesh_dims).for_each([&](std::size_t sender, std::size_t, int64_t elements) {
    sent[sender] += elements;
  });
  return std::ranges::max(sent);
}

// Says whether a step over `mesh_dims` may also run over `mesh_dim` at no cost, so that no element crosses a slower
// link than before.
bool is_free(const StepCosts& costs, uint32_t mesh_dims, std::size_t mesh_dim) {
  if (costs.slowest(mesh_dims | bit(mesh_dim)) != costs.slowest(mesh_dims)) return false;
  for (std::size_t i = 0; mesh_dims >> i != 0; ++i) {
    const double others = costs.slowest(mesh_dims & bit(i)).bytes_per_microsecond;
    if ((mesh_dims & bit(i)) != 0 && costs.slowest(bit(mesh_dim)).bytes_per_microsecond < others) return false;
  }
  return true;
}

}  // namespace

uint32_t shared_mesh_dims(const LayoutSpace& space, const StepCosts& costs, Node from, Node to, uint32_t mesh_dims) {
  if (is_large(space)) return mesh_dims;
  const uint32_t copies = space.replicated(from) & space.changed(from, to);
  uint32_t out = mesh_dims;
  for (std::size_t i = 0; copies >> i != 0; ++i) {
    if ((copies & bit(i)) == 0 || space.counts().ranks().mesh_shape[i] == 1) continue;
    if (is_free(costs, mesh_dims, i)) out |= bit(i);
  }
  return out != mesh_dims && most_sent(space, from, to, out) < most_sent(space, from, to, mesh_dims) ? out : mesh_dims;
}

bool permutes(const LayoutSpace& space, Node from, Node to, uint32_t mesh_dims) {
  if (is_large(space)) return false;
  std::vector<int> sends(space.counts().ranks().count(), 0);
  std::vector<int> receives;  // what a rank keeps counts as one message
  for (std::size_t r = 0; r < sends.size(); ++r)
    receives.push_back(space.counts().held_for(from, r, to, r) > 0 ? 1 : 0);
  Messages(space, from, to, mesh_dims).for_each([&](std::size_t sender, std::size_t receiver, int64_t) {
    ++sends[sender];
    ++receives[receiver];
  });
  const auto several = [](int messages) { return messages > 1; };
  return std::ranges::none_of(sends, several) && std::ranges::none_of(receives, several);
}

}  // namespace tessera
