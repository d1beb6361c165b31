#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tessera/tests/faults/rows.h"

namespace tessera::faults {

// Says what one rank of a trial did.
struct RankOutcome {
  std::optional<double> ended;      // when its process had exited; nullopt if a signal ended it
  std::optional<double> said;       // when its first error came
  bool done = false;                // it did all its work
  std::vector<std::string> errors;  // the texts of its lines "error: TEXT"
};

// Holds everything by which a trial is judged. Times are seconds of one clock.
struct Outcome {
  Expected expected = Expected::kEnds;
  bool names_victim = true;
  double limit_s = 2;
  bool is_noticed = false;           // survivors need not wait for the limit
  std::set<int64_t> victims;         // empty, if the fault has none
  std::optional<double> fault_time;  // nullopt: the fault did not come
  std::optional<double> all_ended;   // when the last rank had ended; nullopt: not judged
  bool timed_out = false;            // the job was ended since it took too long
  std::map<int64_t, RankOutcome> ranks;
  std::string own_error;      // words that the victim's own error must have, or ""
  bool makes_no_key = false;  // from some time on the victim can make no file of the store
  std::vector<std::string> left;

  // The states that the job may have written: "STEP HASH".
  std::set<std::string> whole_states;
  bool any_values = false;      // their hashes may be others
  int64_t newest_reported = 0;  // the highest step of which a rank said that it is saved; 0 if none
  // For each rank that loaded the newest state, "STEP HASH", "none", or why that failed. Empty: nothing to load.
  std::vector<std::string> loaded;

  // Holds what other checks of this trial found: aspect -> text.
  std::multimap<std::string, std::string> found;
};

struct Miss {
  std::string aspect;  // one of kAspects
  std::string text;
};

inline constexpr const char* kAspects[] = {"in time", "named", "nothing left", "data whole"};

// Returns the seconds after the fault within which every survivor must have said its error.
double promised_seconds(const Outcome& outcome);

// Judges a trial: docs/reliability.md says what is promised.
std::vector<Miss> judge(const Outcome& outcome);

// Says whether a survivor's process ended later than promised_seconds() after the fault. The judge allows half a second
// more where its error came in time, since a process needs some time to leave on a busy machine.
bool exits_late(const Outcome& outcome);

// Returns the ranks that the text of an error gives as those that have failed, have ended or do not answer.
std::set<int64_t> blamed_ranks(const std::string& text);

}  // namespace tessera::faults
