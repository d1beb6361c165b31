#include "tessera/inspect/parting.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tessera {
namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();  // the number of no collective

struct Group {
  std::string mesh_dim;
  std::vector<int64_t> ranks;
  friend auto operator<=>(const Group&, const Group&) = default;
};

// Holds the collectives that one rank has begun on one group.
struct Begun {
  std::map<int64_t, const Record*> records;  // by their numbers
  int64_t count = 0;       // how many there were; the ring may have lost the records of the first ones
  bool is_counted = true;  // false: its file is of an earlier version, and there may have been more
  // These are the numbers of the first that has not ended, and of the first in which the rank waits: it waits for the
  // result, or has begun nothing after it.
  int64_t open = kNone, awaited = kNone;

  // Returns the number of the first one that is known: one that has a record, or the next to begin.
  int64_t first() const { return records.empty() ? count + 1 : records.begin()->first; }
};

using ByRank = std::map<int64_t, Begun>;  // those of a group that have left records
using Groups = std::map<Group, ByRank>;

// Says what is known of one rank at one collective.
struct Arrival {
  enum class Kind { kCame, kOverwritten, kDidNotCome, kNoRecords };
  Kind kind = Kind::kNoRecords;
  const Record* record = nullptr;  // of one that came and whose record is there
};

struct Parting {
  Group group;
  int64_t serial = 0;
  std::map<int64_t, Arrival> arrivals;  // by rank
  bool is_alike = true;                 // the records that are there are of the same collective
  int64_t begin_ns = 0;                 // when the first rank began it; 0: all records of it were overwritten
};

// ---- What each rank has begun --------------------------------------------------------------------------------------

// An earlier version wrote no counts.
bool is_counted(const RankRecords& one) {
  return !one.counts.empty() ||
         std::ranges::none_of(one.records, [](const Record& r) { return r.kind == RecordKind::kCollective; });
}

void add_record(const Record& record, bool is_newest, Begun& begun) {
  begun.records[record.serial] = &record;
  begun.count = std::max(begun.count, record.serial);
  if (record.has_ended()) return;
  begun.open = std::min(begun.open, record.serial);
  if (record.waited_from_ns != 0 || is_newest) begun.awaited = std::min(begun.awaited, record.serial);
}

Groups collectives_by_group(const std::vector<RankRecords>& ranks) {
  Groups groups;
  for (const RankRecords& one : ranks) {
    for (const Record& record : one.records) {
      if (record.kind != RecordKind::kCollective) continue;
      add_record(record, &record == &one.records.back(), groups[{record.mesh_dim, record.ranks}][one.rank]);
    }
    for (const CollectiveCount& each : one.counts) {
      int64_t& count = groups[{each.mesh_dim, each.ranks}][one.rank].count;
      count = std::max(count, each.count);
    }
  }
  // A rank that came to no collective of a group of its own has parted from the others at the first.
  for (auto& [group, by_rank] : groups) {
    for (const RankRecords& one : ranks) {
      if (std::ranges::find(group.ranks, one.rank) == group.ranks.end()) continue;
      by_rank[one.rank].is_counted = is_counted(one);
    }
  }
  return groups;
}

// ---- Where the ranks of one group part -----------------------------------------------------------------------------

bool alike(const Record& a, const Record& b) { return a.name == b.name && a.op == b.op && a.path == b.path; }

Arrival arrival_of(const Begun& begun, int64_t serial) {
  const auto found = begun.records.find(serial);
  if (found != begun.records.end()) return {Arrival::Kind::kCame, found->second};
  return {serial <= begun.count ? Arrival::Kind::kOverwritten : Arrival::Kind::kDidNotCome, nullptr};
}

Parting parting_at(const Group& group, const ByRank& by_rank, int64_t serial) {
  Parting out{.group = group, .serial = serial};
  const Record* any = nullptr;
  for (const int64_t rank : group.ranks) {
    const auto begun = by_rank.find(rank);
    const Arrival here = begun == by_rank.end() ? Arrival() : arrival_of(begun->second, serial);
    out.arrivals[rank] = here;
    if (here.record == nullptr) continue;
    out.begin_ns = any == nullptr ? here.record->begin_ns : std::min(out.begin_ns, here.record->begin_ns);
    out.is_alike = out.is_alike && (any == nullptr || alike(*any, *here.record));
    any = here.record;
  }
  return out;
}

// Returns the number of the first collective of which ranks have begun different ones, or to which one of them has not
// come though another has.
int64_t where_these_part(const Group& group, const ByRank& by_rank) {
  int64_t known = 1, fewest = kNone, most = 0;
  bool are_counted = true;
  for (const auto& [rank, begun] : by_rank) {
    known = std::max(known, begun.first());
    fewest = std::min(fewest, begun.count);
    most = std::max(most, begun.count);
    are_counted = are_counted && begun.is_counted;
  }
  for (int64_t serial = known; serial <= fewest; ++serial) {
    if (!parting_at(group, by_rank, serial).is_alike) return serial;
  }
  if (fewest >= most) return kNone;
  // A rank that is not counted may have lost its records of those before the known ones.
  const int64_t next = are_counted ? fewest + 1 : std::max(fewest + 1, known);
  return next <= most ? next : kNone;
}

// Returns the number of the first collective in which one of the ranks waits, else of the first that has not ended.
int64_t first_open(const ByRank& by_rank) {
  int64_t open = kNone, awaited = kNone;
  for (const auto& [rank, begun] : by_rank) {
    open = std::min(open, begun.open);
    awaited = std::min(awaited, begun.awaited);
  }
  return awaited != kNone ? awaited : open;
}

std::optional<Parting> parting_in(const Group& group, const ByRank& by_rank) {
  int64_t serial = where_these_part(group, by_rank);
  const bool are_all_there = std::ranges::all_of(group.ranks, [&](int64_t rank) { return by_rank.contains(rank); });
  // A rank without records may have come to this one; it is not known to have done its part.
  if (!are_all_there) serial = std::min(serial, first_open(by_rank));
  if (serial == kNone) return std::nullopt;
  return parting_at(group, by_rank, serial);
}

// ---- Which parting was the first -----------------------------------------------------------------------------------

bool waits_elsewhere(int64_t rank, const Group& here, const Groups& groups) {
  return std::ranges::any_of(groups, [&](const auto& each) {
    const auto begun = each.second.find(rank);
    return each.first != here && begun != each.second.end() && begun->second.awaited != kNone;
  });
}

// Returns whether the parting follows from another one: each rank that did not come to it waits in a collective of
// another group. Ranks that began different collectives have parted by themselves.
bool is_explained(const Parting& parting, const Groups& groups) {
  return parting.is_alike && std::ranges::all_of(parting.arrivals, [&](const auto& each) {
           const Arrival::Kind kind = each.second.kind;
           return kind == Arrival::Kind::kCame || kind == Arrival::Kind::kOverwritten ||
                  (kind == Arrival::Kind::kDidNotCome && waits_elsewhere(each.first, parting.group, groups));
         });
}

// Returns whether a rank that came to `later` had before begun the collective that `earlier` is on its mesh dimension,
// in a group of its own: ranks run the same program.
bool had_begun(const Parting& later, const Parting& earlier, const Groups& groups) {
  for (const auto& [group, by_rank] : groups) {
    if (group.mesh_dim != earlier.group.mesh_dim) continue;
    for (const auto& [rank, begun] : by_rank) {
      const auto there = later.arrivals.find(rank);
      if (there == later.arrivals.end() || there->second.record == nullptr) continue;
      const auto before = begun.records.find(earlier.serial);
      if (before == begun.records.end()) continue;
      if (before->second->sequence < there->second.record->sequence) return true;
    }
  }
  return false;
}

// Returns the first of some partings, in the order of the program if that is known, else by time: clocks may differ.
const Parting* first_of(std::vector<const Parting*> partings, const Groups& groups) {
  std::ranges::stable_sort(partings, {}, [](const Parting* each) { return each->begin_ns; });
  const auto follows_none = [&](const Parting* each) {
    return std::ranges::none_of(partings, [&](const Parting* other) {
      return had_begun(*each, *other, groups) && !had_begun(*other, *each, groups);
    });
  };
  const auto found = std::ranges::find_if(partings, follows_none);
  return found == partings.end() ? partings.front() : *found;
}

std::optional<Parting> first_parting(const Groups& groups) {
  std::vector<Parting> partings;
  for (const auto& [group, by_rank] : groups) {
    std::optional<Parting> here = parting_in(group, by_rank);
    if (here.has_value()) partings.push_back(std::move(*here));
  }
  std::vector<const Parting*> all, unexplained;
  for (const Parting& each : partings) {
    all.push_back(&each);
    if (!is_explained(each, groups)) unexplained.push_back(&each);
  }
  if (all.empty()) return std::nullopt;
  return *first_of(unexplained.empty() ? all : unexplained, groups);
}

// ---- Text ----------------------------------------------------------------------------------------------------------

std::string text_of(int64_t rank, const Arrival& arrival) {
  switch (arrival.kind) {
    case Arrival::Kind::kCame: return fmt::format("  rank {}: {}\n", rank, to_string(*arrival.record));
    case Arrival::Kind::kOverwritten: return fmt::format("  rank {} came to it; its record is no longer kept\n", rank);
    case Arrival::Kind::kDidNotCome: return fmt::format("  rank {} did not come to it\n", rank);
    case Arrival::Kind::kNoRecords: return fmt::format("  rank {} has no records\n", rank);
  }
  return "";
}

std::string describe(const Parting& parting) {
  std::string text = fmt::format("The ranks first part in collective {} on mesh dimension {} of ranks {}:\n",
                                 parting.serial, parting.group.mesh_dim, fmt::join(parting.group.ranks, ", "));
  for (const auto& [rank, arrival] : parting.arrivals) text += text_of(rank, arrival);
  return text;
}

std::vector<int64_t> missing_ranks(const std::vector<RankRecords>& ranks, const Groups& groups) {
  std::set<int64_t> known, named;
  for (const RankRecords& one : ranks) known.insert(one.rank);
  for (const auto& [group, by_rank] : groups) named.insert(group.ranks.begin(), group.ranks.end());
  std::vector<int64_t> missing;
  std::ranges::set_difference(named, known, std::back_inserter(missing));
  return missing;
}

std::string say_where(const Groups& groups, bool are_all_there) {
  if (const std::optional<Parting> parting = first_parting(groups)) return describe(*parting);
  const bool is_any_recorded = std::ranges::any_of(groups, [](const auto& group) {
    return std::ranges::any_of(group.second, [](const auto& each) { return each.second.count > 0; });
  });
  if (!is_any_recorded) {
    return "No collectives were recorded, so nothing could be compared; the recorder may have been off.\n";
  }
  return are_all_there ? "All ranks have begun the same collectives.\n"
                       : "All ranks that left records have begun the same collectives.\n";
}

std::string list_open(const RankRecords& one) {
  std::string text;
  for (const Record& record : one.records) {
    if (!record.has_ended()) text += fmt::format("    had not ended: {}\n", to_string(record));
  }
  if (!text.empty() || one.records.empty()) return text;
  return fmt::format("    the last that it did: {}\n", to_string(one.records.back()));
}

std::string describe(const RankRecords& one) {
  const uint64_t first = one.records.empty() ? 1 : one.records.front().sequence;
  const std::string lost = first > 1 ? fmt::format(" after {} that were overwritten", first - 1) : "";
  return fmt::format("rank {}, {} records{}: {}\n", one.rank, one.records.size(), lost, one.failure) + list_open(one);
}

}  // namespace

std::string where_ranks_part(const std::vector<RankRecords>& ranks) {
  const Groups groups = collectives_by_group(ranks);
  const std::vector<int64_t> missing = missing_ranks(ranks, groups);
  std::string text = say_where(groups, missing.empty());
  if (!missing.empty()) text += fmt::format("There are no records of ranks {}.\n", fmt::join(missing, ", "));
  for (const RankRecords& one : ranks) text += describe(one);
  return text;
}

}  // namespace tessera
