#include "tessera/placement/plan_space.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "tessera/placement/reduction.h"

namespace tessera {
namespace {

constexpr int64_t kCompareAll = 64;     // ranks
constexpr std::size_t kMostShards = 4;  // tensor dimensions that layouts on the way may shard
constexpr double kNever = std::numeric_limits<double>::infinity();

uint32_t bit(std::size_t mesh_dim) { return uint32_t{1} << mesh_dim; }
bool has(uint32_t mesh_dims, std::size_t mesh_dim) { return (mesh_dims & bit(mesh_dim)) != 0; }

// Whether pending reductions of these kinds go in one step.
bool reduce_together(const Placement& a, const Placement& b) {
  return a == b || (a.reduction().slope(1) && b.reduction().slope(1));
}

void add(Placements& list, const Placement& p) {
  if (std::find(list.begin(), list.end(), p) == list.end()) list.push_back(p);
}

// The tensor dimensions worth sharding on the way: those whose size divides by most mesh dimensions, the larger first.
std::vector<int64_t> shardable(std::span<const int64_t> shape, std::span<const int64_t> mesh_shape) {
  std::vector<int64_t> dims;
  for (std::size_t d = 0; d < shape.size(); ++d) dims.push_back(static_cast<int64_t>(d));
  const auto rank_of = [&](int64_t d) {
    const int64_t size = shape[static_cast<std::size_t>(d)];
    return std::pair(-std::ranges::count_if(mesh_shape, [&](int64_t n) { return size % n == 0; }), -size);
  };
  std::stable_sort(dims.begin(), dims.end(), [&](int64_t a, int64_t b) { return rank_of(a) < rank_of(b); });
  if (dims.size() > kMostShards) dims.resize(kMostShards);
  return dims;
}

// The elements in any of several disjoint sets.
Intervals joined(std::vector<Interval> all) {
  std::sort(all.begin(), all.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  Intervals out;
  for (const Interval& interval : all) append(out, interval);
  return out;
}

}  // namespace

// The mesh dimensions whose placement a step changes, by what becomes of them.
struct PlanSpace::Changes {
  uint32_t all = 0;
  uint32_t reduced = 0;   // a Partial becomes none
  uint32_t embedded = 0;  // a Shard becomes a Partial
  uint32_t formed = 0;    // Replicate becomes a Partial
  uint32_t gathered = 0;  // a Shard becomes Replicate
  bool legal = true;      // no Partial becomes another
};

PlanSpace::PlanSpace(std::span<const int64_t> shape, int64_t element_size, std::span<const int64_t> mesh_shape,
                     const Placements& from, const Placements& to, const CostModel& model)
    : shape_(shape.begin(), shape.end()),
      element_size_(static_cast<double>(element_size)),
      mesh_shape_(mesh_shape.begin(), mesh_shape.end()),
      model_(model),
      parts_(shape.size()),
      parts_numbers_(shape.size()),
      pairs_(shape.size()) {
  least_latency_ = kNever;
  for (const Link& link : model_.links) {
    least_latency_ = std::min(least_latency_, link.microseconds);
    most_bandwidth_ = std::max(most_bandwidth_, link.bytes_per_microsecond);
  }
  for (const int64_t n : mesh_shape_) all_ranks_ *= n;
  make_candidates(from, to);
  make_ranks();
  from_ = number_of(from);
  to_ = number_of(to);
  infos_.resize(static_cast<std::size_t>(size_));
}

void PlanSpace::make_candidates(const Placements& from, const Placements& to) {
  const std::vector<int64_t> dims = shardable(shape_, mesh_shape_);
  for (std::size_t i = 0; i < ndim(); ++i) {
    Placements list;
    add(list, Replicate());
    for (const Placement* end : {&from[i], &to[i]}) {
      add(list, *end);
      if (end->is_shard() && end->order() != 0) add(list, end->ordered(0));
      pending_ |= end->is_partial();
    }
    if (mesh_shape_[i] > 1) {
      for (const int64_t d : dims) add(list, Shard(d));
    }
    for (const Placement& p : list) ordered_ |= p.order() != 0;
    strides_.push_back(size_);
    size_ *= static_cast<Node>(list.size());
    candidates_.push_back(std::move(list));
  }
}

void PlanSpace::make_ranks() {
  ranks_ = {{}};
  for (const int64_t n : mesh_shape_) {
    std::vector<std::vector<int64_t>> longer;
    for (const auto& start : ranks_) {
      for (int64_t c = 0; c < n; ++c) {
        if (all_ranks_ > kCompareAll && c >= 2 && c != n - 1) continue;
        longer.push_back(start);
        longer.back().push_back(c);
      }
    }
    ranks_ = std::move(longer);
  }
}

PlanSpace::Node PlanSpace::number_of(const Placements& placements) const {
  Node node = 0;
  for (std::size_t i = 0; i < ndim(); ++i) {
    const auto found = std::find(candidates_[i].begin(), candidates_[i].end(), placements[i]);
    node += strides_[i] * static_cast<Node>(found - candidates_[i].begin());
  }
  return node;
}

Placements PlanSpace::placements_of(Node node) const {
  Placements out;
  for (std::size_t i = 0; i < ndim(); ++i) out.push_back(placement(node, i));
  return out;
}

// ---- how layouts cut -----------------------------------------------------------------------------------------------

PlanSpace::Parts PlanSpace::cut(std::size_t tensor_dim, const Placements& placements) const {
  const int64_t size = shape_[tensor_dim];
  const std::vector<Cut> cuts = cuts_of(static_cast<int64_t>(tensor_dim), placements, mesh_shape_);
  Parts out;
  for (std::size_t k = 0; k < cuts.size(); ++k) {
    // What a fixed partition cuts must be what it was made for.
    const Partition& partition = *cuts[k].partition;
    out.legal &= partition.parts().value_or(cuts[k].parts) == cuts[k].parts;
    const std::vector<Cut> before(cuts.begin(), cuts.begin() + static_cast<std::ptrdiff_t>(k));
    const auto fits = [&](const auto& coordinate) {
      return count(part_of(size, before, mesh_shape_, coordinate)) == *partition.size();
    };
    if (out.legal && partition.size()) out.legal = std::ranges::all_of(ranks_, fits);
    for (const int64_t mesh_dim : cuts[k].mesh_dims) {
      out.sequence.push_back(mesh_dim);
      out.cutters |= bit(static_cast<std::size_t>(mesh_dim));
    }
  }
  if (!out.legal) return out;
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    // A rank that agrees with an earlier one in all coordinates that cut has the same.
    std::size_t like = 0;
    const auto differs = [&](int64_t mesh_dim) {
      const auto i = static_cast<std::size_t>(mesh_dim);
      return ranks_[like][i] != ranks_[r][i];
    };
    while (like < r && std::ranges::any_of(out.sequence, differs)) ++like;
    out.at.push_back(like < r ? out.at[like] : part_of(size, cuts, mesh_shape_, ranks_[r]));
    out.sizes.push_back(count(out.at.back()));
  }
  return out;
}

int PlanSpace::parts_of(std::size_t tensor_dim, Node node) {
  Node key = 0;
  for (std::size_t i = 0; i < ndim(); ++i) {
    if (placement(node, i).is_shard(static_cast<int64_t>(tensor_dim))) {
      key += strides_[i] * static_cast<Node>(choice(node, i));
    }
  }
  const auto [found, fresh] = parts_numbers_[tensor_dim].emplace(key, static_cast<int>(parts_[tensor_dim].size()));
  if (fresh) {
    parts_[tensor_dim].push_back(cut(tensor_dim, placements_of(node)));
    pairs_[tensor_dim].emplace_back();
  }
  return found->second;
}

bool PlanSpace::in_normal_order(const Info& info, Node node) const {
  for (std::size_t i = 0; i < ndim(); ++i) {
    const Placement& p = placement(node, i);
    if (p.order() == 0) continue;
    const auto d = static_cast<std::size_t>(p.tensor_dim());
    const auto& sequence = parts_[d][static_cast<std::size_t>(info.parts[d])].sequence;
    const auto place = std::ranges::find(sequence, static_cast<int64_t>(i)) - sequence.begin();
    if (std::ranges::is_sorted(sequence) || place != p.order()) return false;
  }
  return true;
}

const PlanSpace::Info& PlanSpace::info(Node node) {
  Info& info = infos_[static_cast<std::size_t>(node)];
  if (info.looked_at) return info;
  info.looked_at = true;
  info.legal = !pending_ || partials_commute(placements_of(node));
  info.numel.assign(ranks_.size(), 1);
  for (std::size_t d = 0; d < shape_.size() && info.legal; ++d) {
    info.parts.push_back(parts_of(d, node));
    const Parts& part = parts_[d][static_cast<std::size_t>(info.parts.back())];
    info.legal = part.legal;
    for (std::size_t r = 0; r < ranks_.size() && info.legal; ++r) info.numel[r] *= part.sizes[r];
  }
  // Of layouts that differ in their orders alone, the one that normalize() makes.
  if (info.legal && ordered_ && node != from_ && node != to_) info.legal = in_normal_order(info, node);
  if (info.legal) info.largest = *std::ranges::max_element(info.numel);
  return info;
}

const std::vector<Intervals>& PlanSpace::merged(std::size_t tensor_dim, int number, uint32_t mesh_dims) {
  Parts& parts = parts_[tensor_dim][static_cast<std::size_t>(number)];
  if (mesh_dims == 0) return parts.at;
  std::vector<Intervals>& out = parts.merged[mesh_dims];
  if (!out.empty()) return out;
  // By the first rank of each group: the one at coordinate 0 of `mesh_dims`.
  std::map<std::vector<int64_t>, std::pair<std::vector<Interval>, Intervals>> groups;
  const auto group_of = [&](std::size_t r) {
    std::vector<int64_t> key = ranks_[r];
    for (std::size_t i = 0; i < ndim(); ++i) {
      if (has(mesh_dims, i)) key[i] = 0;
    }
    return key;
  };
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    auto& all = groups[group_of(r)].first;
    all.insert(all.end(), parts.at[r].begin(), parts.at[r].end());
  }
  for (auto& [key, group] : groups) group.second = joined(std::move(group.first));
  for (std::size_t r = 0; r < ranks_.size(); ++r) out.push_back(groups[group_of(r)].second);
  return out;
}

bool PlanSpace::covers(std::size_t tensor_dim, int from, uint32_t mesh_dims, int to, bool& whole) {
  const std::vector<Intervals>& have = merged(tensor_dim, from, mesh_dims);
  const Parts& want = parts_[tensor_dim][static_cast<std::size_t>(to)];
  whole = true;
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    if (overlap(have[r], want.at[r]) != want.sizes[r]) return false;
    whole &= count(have[r]) == want.sizes[r];
  }
  return true;
}

const PlanSpace::Pair& PlanSpace::pair(std::size_t tensor_dim, int from, int to) {
  auto& row = pairs_[tensor_dim][static_cast<std::size_t>(from)];
  if (row.size() <= static_cast<std::size_t>(to)) row.resize(parts_[tensor_dim].size());
  Pair& out = row[static_cast<std::size_t>(to)];
  if (out.known) return out;
  out.known = true;
  const Parts& a = parts_[tensor_dim][static_cast<std::size_t>(from)];
  const Parts& b = parts_[tensor_dim][static_cast<std::size_t>(to)];
  for (std::size_t r = 0; r < ranks_.size(); ++r) out.common.push_back(from == to ? a.sizes[r] : overlap(a.at[r], b.at[r]));
  if (from == to) {
    out.whole = true;
  } else if (all_ranks_ <= kCompareAll) {
    for (int fewest = 0; fewest <= std::popcount(a.cutters); ++fewest) {
      for (uint32_t mesh_dims = 0; mesh_dims <= a.cutters; ++mesh_dims) {
        if ((mesh_dims & ~a.cutters) != 0 || std::popcount(mesh_dims) != fewest) continue;
        out.needs = mesh_dims;
        if (covers(tensor_dim, from, mesh_dims, to, out.whole)) return out;
      }
    }
  } else {
    // What is cut alike from the front stays; all inside it is needed.
    std::size_t same = 0;
    while (same < a.sequence.size() && same < b.sequence.size() && a.sequence[same] == b.sequence[same]) ++same;
    for (std::size_t k = same; k < a.sequence.size(); ++k) out.needs |= bit(static_cast<std::size_t>(a.sequence[k]));
    out.whole = same == b.sequence.size();
  }
  return out;
}

uint32_t PlanSpace::needs(Node from, Node to, bool& whole) {
  const Info& a = info(from);
  const Info& b = info(to);
  uint32_t out = 0;
  whole = true;
  for (std::size_t d = 0; d < shape_.size(); ++d) {
    const Pair& each = pair(d, a.parts[d], b.parts[d]);
    out |= each.needs;
    whole &= each.whole;
  }
  return out;
}

PlanSpace::Missing PlanSpace::missing(Node from, Node to) {
  const Info& a = info(from);
  const Info& b = info(to);
  const std::vector<int64_t>* common[8] = {};
  const std::size_t dims = std::min<std::size_t>(shape_.size(), 8);
  for (std::size_t d = 0; d < dims; ++d) common[d] = &pair(d, a.parts[d], b.parts[d]).common;
  Missing out;
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    int64_t held = 1;
    for (std::size_t d = 0; d < dims; ++d) held *= (*common[d])[r];
    for (std::size_t d = dims; d < shape_.size(); ++d) held *= pair(d, a.parts[d], b.parts[d]).common[r];
    const int64_t lacks = b.numel[r] - held;
    out.most = std::max(out.most, lacks);
    out.live = std::max(out.live, a.numel[r] + b.numel[r] + 2 * lacks);
  }
  return out;
}

// ---- steps -----------------------------------------------------------------------------------------------------------

PlanSpace::Changes PlanSpace::changes(Node from, Node to) const {
  Changes out;
  for (std::size_t i = 0; i < ndim(); ++i) {
    if (choice(from, i) == choice(to, i)) continue;
    const Placement& now = placement(from, i);
    const Placement& then = placement(to, i);
    out.all |= bit(i);
    if (now.is_partial()) {
      out.legal &= !then.is_partial();
      out.reduced |= bit(i);
    } else if (then.is_partial()) {
      (now.is_shard() ? out.embedded : out.formed) |= bit(i);
    } else if (now.is_shard() && then.is_replicate()) {
      out.gathered |= bit(i);
    }
  }
  return out;
}

std::optional<Edge> PlanSpace::edge(Node from, Node to) {
  const Changes change = changes(from, to);
  if (change.all == 0 || !change.legal || !info(from).legal || !info(to).legal) return std::nullopt;
  if (change.reduced != 0) return reduction(from, to, change);
  bool whole = false;
  const uint32_t needed = needs(from, to, whole);
  // A Shard's piece among neutral elements is a term: what its mesh dimension holds apart need not come together.
  if ((needed & ~change.embedded) == 0) {
    return Edge{.peak = live(from, to, 0)};
  }
  if ((change.embedded | change.formed) != 0) return std::nullopt;
  return move(from, to, change, needed, whole);
}

double PlanSpace::live(Node from, Node to, double received) {
  const Info& a = info(from);
  const Info& b = info(to);
  double most = 0;
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    most = std::max(most, static_cast<double>(a.numel[r]) + (1 + received) * static_cast<double>(b.numel[r]));
  }
  return element_size_ * most;
}

std::optional<Edge> PlanSpace::reduction(Node from, Node to, const Changes& change) {
  if ((change.embedded | change.formed) != 0) return std::nullopt;
  const Placement* first = nullptr;
  bool scatters = false;
  for (std::size_t i = 0; i < ndim(); ++i) {
    if (!has(change.reduced, i)) continue;
    const Placement& now = placement(from, i);
    if (first != nullptr && !reduce_together(*first, now)) return std::nullopt;
    first = &now;
    scatters |= placement(to, i).is_shard();
  }
  // Every rank must have a term of all that it is to have the value of.
  bool whole = false;
  if (needs(from, to, whole) != 0) return std::nullopt;
  const auto n = static_cast<double>(ranks_of(change.reduced));
  const auto largest = static_cast<double>(info(to).largest);
  Edge out = scatters ? priced(PlanStep::Kind::kReduceScatter, change.reduced, largest * (n - 1))
                      : priced(PlanStep::Kind::kAllReduce, change.reduced, 2 * largest * (n - 1) / n);
  out.peak = live(from, to, scatters ? n - 1 : 2 * (n - 1) / n);
  return out;
}

Edge PlanSpace::move(Node from, Node to, const Changes& change, uint32_t needed, bool whole) {
  const Missing lacks = missing(from, to);
  const bool gathers = whole && change.all == needed && change.gathered == needed;
  Edge out =
      priced(gathers ? PlanStep::Kind::kAllGather : PlanStep::Kind::kAllToAll, needed, static_cast<double>(lacks.most));
  out.peak = element_size_ * static_cast<double>(lacks.live);
  return out;
}

int64_t PlanSpace::common(const Info& from, std::size_t sender, const Info& to, std::size_t receiver) const {
  int64_t elements = 1;
  for (std::size_t d = 0; d < shape_.size(); ++d) {
    elements *= overlap(parts_[d][static_cast<std::size_t>(from.parts[d])].at[sender],
                        parts_[d][static_cast<std::size_t>(to.parts[d])].at[receiver]);
  }
  return elements;
}

template <typename Visit>
void PlanSpace::for_each_message(Node from, Node to, uint32_t mesh_dims, const Visit& visit) {
  const Info& a = info(from);
  const Info& b = info(to);
  for (std::size_t sender = 0; sender < ranks_.size(); ++sender) {
    int64_t copies = 1;
    int64_t mine = 0;  // which of them the sender is
    for (std::size_t i = 0; i < ndim(); ++i) {
      if (!has(mesh_dims, i) || placement(from, i).is_shard()) continue;
      copies *= mesh_shape_[i];
      mine = mine * mesh_shape_[i] + ranks_[sender][i];
    }
    int64_t turn = 0;
    for (std::size_t receiver = 0; receiver < ranks_.size(); ++receiver) {
      if (!asks(from, sender, receiver, mesh_dims)) continue;
      const int64_t needed = common(a, sender, b, receiver);
      if (needed > 0 && turn++ % copies == mine) visit(sender, receiver, needed);
    }
  }
}

int64_t PlanSpace::most_sent(Node from, Node to, uint32_t mesh_dims) {
  std::vector<int64_t> sent(ranks_.size(), 0);
  for_each_message(from, to, mesh_dims,
                   [&](std::size_t sender, std::size_t, int64_t elements) { sent[sender] += elements; });
  return *std::ranges::max_element(sent);
}

bool PlanSpace::permutes(Node from, Node to, uint32_t mesh_dims) {
  if (all_ranks_ > kCompareAll) return false;
  std::vector<int> sends(ranks_.size(), 0);
  std::vector<int> receives;  // what stays counts as from itself
  for (std::size_t r = 0; r < ranks_.size(); ++r) receives.push_back(common(info(from), r, info(to), r) > 0 ? 1 : 0);
  for_each_message(from, to, mesh_dims, [&](std::size_t sender, std::size_t receiver, int64_t) {
    ++sends[sender];
    ++receives[receiver];
  });
  const auto several = [](int messages) { return messages > 1; };
  return std::ranges::none_of(sends, several) && std::ranges::none_of(receives, several);
}

bool PlanSpace::asks(Node from, std::size_t sender, std::size_t receiver, uint32_t mesh_dims) const {
  bool holds_same = true;
  for (std::size_t i = 0; i < ndim(); ++i) {
    if (ranks_[sender][i] == ranks_[receiver][i]) continue;
    if (!has(mesh_dims, i)) return false;
    holds_same &= !placement(from, i).is_shard();
  }
  return !holds_same;
}

uint32_t PlanSpace::shared(Node from, Node to, uint32_t mesh_dims) {
  if (all_ranks_ > kCompareAll) return mesh_dims;
  uint32_t out = mesh_dims;
  for (std::size_t i = 0; i < ndim(); ++i) {
    const bool copies = placement(from, i).is_replicate() && choice(from, i) != choice(to, i) && mesh_shape_[i] > 1;
    if (copies && slowest(mesh_dims | bit(i)) == slowest(mesh_dims)) out |= bit(i);
  }
  return out != mesh_dims && most_sent(from, to, out) < most_sent(from, to, mesh_dims) ? out : mesh_dims;
}

int64_t PlanSpace::ranks_of(uint32_t mesh_dims) const {
  int64_t n = 1;
  for (std::size_t i = 0; i < ndim(); ++i) {
    if (has(mesh_dims, i)) n *= mesh_shape_[i];
  }
  return n;
}

Link PlanSpace::slowest(uint32_t mesh_dims) const {
  Link out{.microseconds = 0, .bytes_per_microsecond = kNever};
  for (std::size_t i = 0; i < ndim(); ++i) {
    if (!has(mesh_dims, i) || mesh_shape_[i] == 1) continue;
    out.microseconds = std::max(out.microseconds, model_.links[i].microseconds);
    out.bytes_per_microsecond = std::min(out.bytes_per_microsecond, model_.links[i].bytes_per_microsecond);
  }
  return out;
}

Edge PlanSpace::priced(PlanStep::Kind kind, uint32_t mesh_dims, double elements) const {
  Edge out{.kind = kind, .mesh_dims = mesh_dims, .bytes = elements * element_size_};
  if (ranks_of(mesh_dims) == 1 || elements == 0) return out;
  const Link link = slowest(mesh_dims);
  out.microseconds = link.microseconds + out.bytes / link.bytes_per_microsecond;
  return out;
}

// ---- bounds ----------------------------------------------------------------------------------------------------------

double PlanSpace::bound(Node node) {
  Info& known = infos_[static_cast<std::size_t>(node)];
  if (known.bound < 0) {
    info(node);
    known.bound = known.legal ? find_bound(node) : kNever;
  }
  return known.bound;
}

double PlanSpace::find_bound(Node node) {
  if (node == to_) return 0;
  const Changes change = changes(node, to_);
  bool kept = false;  // a Partial on both ends
  for (std::size_t i = 0; pending_ && i < ndim(); ++i) kept |= placement(node, i).is_partial() && !has(change.reduced, i);
  const int64_t terms = ranks_of(change.reduced);
  if ((change.embedded | change.formed) != 0 || kept) {
    // What the target's ranks hold is not what they need of the value.
    return terms > 1 && info(node).largest > 0 ? least_latency_ : 0;
  }
  if (!change.legal) return 0;
  const double elements =
      terms > 1 ? reduction_bound(static_cast<double>(terms)) : static_cast<double>(missing(node, to_).most);
  if (elements <= 0) return 0;
  return least_latency_ + elements * element_size_ / most_bandwidth_;
}

// The terms of an element meet in terms - 1 messages at least, and then its value goes to every further rank that needs it; and
// every rank receives every element of its target, for none has its value.
double PlanSpace::reduction_bound(double terms) {
  const Info& target = info(to_);
  double held = 0;
  for (const int64_t numel : target.numel) held += static_cast<double>(numel);
  double all = 1;
  for (const int64_t size : shape_) all *= static_cast<double>(size);
  const double mean = held / static_cast<double>(target.numel.size()) + all * (terms - 2) / static_cast<double>(all_ranks_);
  return std::max(mean, static_cast<double>(target.largest));
}

double PlanSpace::memory_limit() {
  const auto source = static_cast<double>(info(from_).largest);
  const auto target = static_cast<double>(info(to_).largest);
  return element_size_ * (source + target + 2 * std::max(source, target));
}

}  // namespace tessera
