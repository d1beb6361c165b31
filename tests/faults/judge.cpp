#include <algorithm>
#include <iterator>
#include <regex>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/tests/faults/outcome.h"

namespace tessera::faults {
namespace {

constexpr double kSlack = 2;       // seconds after the limit within which every survivor ends
constexpr double kNoticed = 5;     // seconds within which they end where they need not wait for the limit
constexpr double kToLeave = 0.5;   // seconds that a process may need to leave on a busy machine
constexpr double kToSeeIt = 0.75;  // seconds that the campaign may need to see that the last process has ended

using Misses = std::vector<Miss>;

void judge_good_end(const Outcome& outcome, Misses& misses) {
  for (const auto& [rank, seen] : outcome.ranks) {
    if (seen.done && seen.errors.empty()) continue;
    misses.push_back({"in time", fmt::format("rank {} should have done its work, and did not: {}", rank,
                                             seen.errors.empty() ? "it said nothing" : seen.errors.front())});
  }
}

void judge_time(const Outcome& outcome, int64_t rank, const RankOutcome& seen, Misses& misses) {
  if (!seen.ended) {
    misses.push_back({"in time", fmt::format("rank {} did not end by itself: a signal ended it", rank)});
    return;
  }
  const double promised = promised_seconds(outcome);
  const double said = seen.said.value_or(*seen.ended) - *outcome.fault_time;
  const double ended = *seen.ended - *outcome.fault_time;
  if (!seen.done && said > promised) {
    misses.push_back({"in time", fmt::format("rank {} said so {:.2f} s after the fault, with a limit of {} s", rank,
                                             said, outcome.limit_s)});
  } else if (ended > promised + kToLeave) {
    misses.push_back({"in time", fmt::format("rank {} ended {:.2f} s after the fault, with a limit of {} s", rank,
                                             ended, outcome.limit_s)});
  }
}

void judge_names(const Outcome& outcome, int64_t rank, const RankOutcome& seen, Misses& misses) {
  if (seen.errors.empty()) {
    misses.push_back({"named", fmt::format("rank {} ended without an error", rank)});
    return;
  }
  const std::set<int64_t> blamed = blamed_ranks(seen.errors.front());
  const bool right = std::ranges::any_of(outcome.victims, [&](int64_t each) { return blamed.contains(each); });
  if (right) return;
  misses.push_back(
      {"named", fmt::format("rank {} blames ranks [{}], where the victims are [{}]: {}", rank, fmt::join(blamed, ", "),
                            fmt::join(outcome.victims, ", "), seen.errors.front())});
}

// Says whether a victim could not open the store's folder, or make any file there, so that it could tell the others
// nothing.
bool could_not_tell(const Outcome& outcome) {
  return std::ranges::any_of(outcome.victims, [&](int64_t each) {
    const auto seen = outcome.ranks.find(each);
    if (seen == outcome.ranks.end() || seen->second.errors.empty()) return false;
    const std::string& text = seen->second.errors.front();
    return text.starts_with("cannot open folder") ||
           (outcome.makes_no_key && text.starts_with("cannot make a file in the store's folder"));
  });
}

// Promise 4: a rank's own trouble is said as that, by the others too.
void judge_own_error(const Outcome& outcome, Misses& misses) {
  if (outcome.own_error.empty()) return;
  const bool is_told = !could_not_tell(outcome);
  for (const auto& [rank, seen] : outcome.ranks) {
    const bool is_victim = outcome.victims.contains(rank);
    if (!is_told && !is_victim) continue;
    if (is_victim && seen.errors.empty() && !seen.done) {
      misses.push_back({"named", fmt::format("rank {}, whose own trouble is '{}', ended without an error", rank,
                                             outcome.own_error)});
    }
    if (seen.errors.empty() || seen.errors.front().find(outcome.own_error) != std::string::npos) continue;
    misses.push_back({"named", fmt::format("rank {} does not say '{}', the trouble of ranks [{}]: {}", rank,
                                           outcome.own_error, fmt::join(outcome.victims, ", "), seen.errors.front())});
  }
}

void judge_survivors(const Outcome& outcome, Misses& misses) {
  for (const auto& [rank, seen] : outcome.ranks) {
    if (outcome.victims.contains(rank)) continue;
    if (outcome.expected == Expected::kEnds) judge_time(outcome, rank, seen, misses);
    if (seen.done || !outcome.names_victim || outcome.victims.empty()) continue;
    judge_names(outcome, rank, seen, misses);
  }
  judge_own_error(outcome, misses);
  if (!outcome.all_ended) return;
  const double seconds = *outcome.all_ended - *outcome.fault_time;
  if (seconds > promised_seconds(outcome) + kToLeave + kToSeeIt) {
    misses.push_back({"in time", fmt::format("the last process ended {:.2f} s after the fault", seconds)});
  }
}

void judge_data(const Outcome& outcome, Misses& misses) {
  if (outcome.loaded.empty()) return;
  const std::string& first = outcome.loaded.front();
  for (const std::string& each : outcome.loaded) {
    if (each == first) continue;
    misses.push_back({"data whole", fmt::format("ranks loaded '{}' and '{}'", first, each)});
    return;
  }
  if (first == "none") {
    if (outcome.newest_reported > 0) {
      misses.push_back(
          {"data whole", fmt::format("step {} was saved, and no state is there", outcome.newest_reported)});
    }
    return;
  }
  const std::string step = first.substr(0, first.find(' '));
  const bool is_step = !step.empty() && step.find_first_not_of("0123456789") == std::string::npos;
  if (!is_step || (!outcome.any_values && !outcome.whole_states.contains(first))) {
    misses.push_back({"data whole", fmt::format("ranks loaded '{}', which no job without a fault has saved", first)});
  } else if (std::stoll(step) < outcome.newest_reported) {
    misses.push_back({"data whole", fmt::format("step {} was saved, and the newest state is that of step {}",
                                                outcome.newest_reported, step)});
  }
}

void add_numbers(const std::string& list, std::set<int64_t>& ranks) {
  static const std::regex number("[0-9]+");
  for (auto each = std::sregex_iterator(list.begin(), list.end(), number); each != std::sregex_iterator(); ++each) {
    ranks.insert(std::stoll(each->str()));
  }
}

}  // namespace

std::set<int64_t> blamed_ranks(const std::string& text) {
  static const std::regex one(
      "rank ([0-9]+)(?: was killed| was stopped| exited| failed in| has ended| has not written its part|, which serves "
      "the store,|: "
      "the planned fault)");
  // A text that all ranks get alike begins with the rank whose error it is.
  static const std::regex owner("^rank ([0-9]+): (?!the job has failed)");
  static const std::regex several("ranks? \\[([0-9, ]+)\\](?: do not answer| did not come| have come to their end|: )");
  std::set<int64_t> ranks;
  for (const std::regex& pattern : {one, owner, several}) {
    for (auto each = std::sregex_iterator(text.begin(), text.end(), pattern); each != std::sregex_iterator(); ++each) {
      // "over ranks [0, 1]: a peer was lost" names those who were in a collective.
      if (each->position() >= 5 && text.compare(static_cast<std::size_t>(each->position()) - 5, 5, "over ") == 0)
        continue;
      add_numbers((*each)[1], ranks);
    }
  }
  return ranks;
}

double promised_seconds(const Outcome& outcome) {
  const double by_limit = outcome.limit_s + kSlack;
  return outcome.is_noticed ? std::min(by_limit, kNoticed) : by_limit;
}

bool exits_late(const Outcome& outcome) {
  if (!outcome.fault_time || outcome.expected == Expected::kEndsWell) return false;
  return std::ranges::any_of(outcome.ranks, [&](const auto& each) {
    const RankOutcome& seen = each.second;
    return !outcome.victims.contains(each.first) && seen.ended &&
           *seen.ended - *outcome.fault_time > promised_seconds(outcome);
  });
}

std::vector<Miss> judge(const Outcome& outcome) {
  Misses misses;
  if (outcome.timed_out) misses.push_back({"in time", "the job did not end"});
  if (!outcome.fault_time && !outcome.victims.empty()) {
    judge_good_end(outcome, misses);
  } else if (outcome.expected == Expected::kEndsWell) {
    judge_good_end(outcome, misses);
  } else if (outcome.fault_time) {
    judge_survivors(outcome, misses);
  }
  for (const std::string& each : outcome.left) misses.push_back({"nothing left", each});
  judge_data(outcome, misses);
  for (const auto& [aspect, text] : outcome.found) misses.push_back({aspect, text});
  return misses;
}

}  // namespace tessera::faults
