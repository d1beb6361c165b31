#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include <fmt/format.h>

#include "tessera/inspect/trace.h"

namespace tessera {
namespace {

// Holds what identifies a collective on all its ranks: the mesh dimension, the ranks and the number.
using Key = std::tuple<std::string, std::vector<int64_t>, int64_t>;

int64_t waited_for(const Record& last, const Record& other) {
  return other.waited_from_ns == 0 ? 0 : std::max<int64_t>(0, last.begin_ns - other.waited_from_ns);
}

std::map<Key, std::vector<const Record*>> by_collective(const std::vector<Record>& records) {
  std::map<Key, std::vector<const Record*>> out;
  for (const Record& r : records) {
    if (r.kind == RecordKind::kCollective) out[{r.mesh_dim, r.ranks, r.serial}].push_back(&r);
  }
  return out;
}

}  // namespace

std::vector<RankLateness> late_ranks(const std::vector<Record>& gathered) {
  std::map<int64_t, RankLateness> by_rank;
  for (const auto& [key, records] : by_collective(gathered)) {
    if (records.size() < 2) continue;
    const Record& last = **std::ranges::max_element(records, {}, [](const Record* r) { return r->begin_ns; });
    for (const Record* r : records) {
      ++by_rank[r->rank].collectives;
      if (r != &last) by_rank[last.rank].waited_ns += waited_for(last, *r);
    }
    ++by_rank[last.rank].last;
  }
  std::vector<RankLateness> out;
  for (auto& [rank, lateness] : by_rank) {
    lateness.rank = rank;
    out.push_back(lateness);
  }
  std::ranges::stable_sort(out, std::ranges::greater(), &RankLateness::waited_ns);
  return out;
}

std::string to_string(const std::vector<RankLateness>& ranks) {
  std::string text =
      fmt::format("{:>5}  {:>11}  {:>9}  {:>21}\n", "rank", "collectives", "came last", "ms that others waited");
  for (const RankLateness& each : ranks) {
    text += fmt::format("{:>5}  {:>11}  {:>9}  {:>21.3f}\n", each.rank, each.collectives, each.last,
                        static_cast<double>(each.waited_ns) / 1e6);
  }
  return text;
}

}  // namespace tessera
