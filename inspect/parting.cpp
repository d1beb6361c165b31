#include "tessera/inspect/parting.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tessera {
namespace {

// Holds the collectives that one rank has begun on one group.
struct Begun {
  std::map<int64_t, const Record*> records;  // by their numbers
  int64_t count = 0;  // how many there were; the ring may have lost the records of the first ones

  // Returns the number of the first one that is known: one that has a record, or the next to begin.
  int64_t first() const { return records.empty() ? count + 1 : records.begin()->first; }
};

struct Group {
  std::string mesh_dim;
  std::vector<int64_t> ranks;
  friend auto operator<=>(const Group&, const Group&) = default;
};

struct Parting {
  Group group;
  int64_t serial = 0;
  int64_t begin_ns = 0;                    // when the first rank began it
  std::map<int64_t, const Record*> began;  // by rank; null: it did not come
};

std::map<Group, std::map<int64_t, Begun>> collectives_by_group(const std::vector<RankRecords>& ranks) {
  std::map<Group, std::map<int64_t, Begun>> groups;
  for (const RankRecords& one : ranks) {
    for (const Record& record : one.records) {
      if (record.kind != RecordKind::kCollective) continue;
      groups[{record.mesh_dim, record.ranks}][one.rank].records[record.serial] = &record;
    }
    for (const CollectiveCount& each : one.counts) groups[{each.mesh_dim, each.ranks}][one.rank].count = each.count;
  }
  // A rank that came to no collective of a group of its own has parted from the others at the first.
  for (auto& [group, by_rank] : groups) {
    for (const RankRecords& one : ranks) {
      if (std::ranges::find(group.ranks, one.rank) != group.ranks.end()) by_rank[one.rank];
    }
  }
  return groups;
}

bool alike(const Record& a, const Record& b) { return a.name == b.name && a.op == b.op && a.path == b.path; }

std::optional<Parting> parting_in(const Group& group, const std::map<int64_t, Begun>& by_rank) {
  int64_t first = 1, last = 0;
  for (const auto& [rank, begun] : by_rank) {
    first = std::max(first, begun.first());
    if (!begun.records.empty()) last = std::max(last, begun.records.rbegin()->first);
  }
  for (int64_t serial = first; serial <= last; ++serial) {
    Parting here{.group = group, .serial = serial, .begin_ns = std::numeric_limits<int64_t>::max(), .began = {}};
    const Record* any = nullptr;
    bool parts = false;
    for (const auto& [rank, begun] : by_rank) {
      const auto found = begun.records.find(serial);
      const Record* const record = found == begun.records.end() ? nullptr : found->second;
      here.began[rank] = record;
      parts |= record == nullptr || (any != nullptr && !alike(*any, *record));
      if (record == nullptr) continue;
      any = record;
      here.begin_ns = std::min(here.begin_ns, record->begin_ns);
    }
    if (parts && any != nullptr) return here;
  }
  return std::nullopt;
}

std::string describe(const Parting& parting) {
  std::string text = fmt::format("The ranks first part in collective {} on mesh dimension {} of ranks {}:\n",
                                 parting.serial, parting.group.mesh_dim, fmt::join(parting.group.ranks, ", "));
  for (const auto& [rank, record] : parting.began) {
    text += record == nullptr ? fmt::format("  rank {} did not come to it\n", rank)
                              : fmt::format("  rank {}: {}\n", rank, to_string(*record));
  }
  return text;
}

std::string list_missing(const std::vector<RankRecords>& ranks) {
  std::set<int64_t> known, named;
  for (const RankRecords& one : ranks) {
    known.insert(one.rank);
    for (const Record& record : one.records) named.insert(record.ranks.begin(), record.ranks.end());
  }
  std::vector<int64_t> missing;
  std::ranges::set_difference(named, known, std::back_inserter(missing));
  return missing.empty() ? "" : fmt::format("There are no records of ranks {}.\n", fmt::join(missing, ", "));
}

std::string list_open(const RankRecords& one) {
  std::string text;
  for (const Record& record : one.records) {
    if (!record.has_ended()) text += fmt::format("    had not ended: {}\n", to_string(record));
  }
  if (!text.empty() || one.records.empty()) return text;
  return fmt::format("    the last that it did: {}\n", to_string(one.records.back()));
}

}  // namespace

std::string where_ranks_part(const std::vector<RankRecords>& ranks) {
  std::optional<Parting> earliest;
  for (const auto& [group, by_rank] : collectives_by_group(ranks)) {
    const std::optional<Parting> here = parting_in(group, by_rank);
    if (here && (!earliest || here->begin_ns < earliest->begin_ns)) earliest = here;
  }
  std::string text = earliest ? describe(*earliest) : "All ranks have begun the same collectives.\n";
  text += list_missing(ranks);
  for (const RankRecords& one : ranks) {
    text += fmt::format("rank {}, {} records: {}\n", one.rank, one.records.size(), one.failure);
    text += list_open(one);
  }
  return text;
}

}  // namespace tessera
