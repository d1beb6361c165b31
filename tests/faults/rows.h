#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::faults {

enum class Kind { kJob, kTwoFolderUsers, kSecondJob, kStaleStore, kPortTaken, kLauncherSignal, kLauncherOutput };
// Says which ranks a trial may choose as the victim.
enum class Victims { kNone, kFirstOrLast, kAny };
enum class Expected {
  kEnds,      // survivors end with an error in time, unless they have done all their work
  kEndsWell,  // every rank does all its work
  kIsOver,    // the job ends in time, however; nothing else can be known
};

// Describes one row of the campaign. A trial draws one of each list.
struct Row {
  std::string name;
  Kind kind = Kind::kJob;
  std::vector<std::string> faults = {""};
  std::vector<std::string> points = {};
  // The next four belong to the point "call".
  std::vector<std::string> calls = {"any"};
  std::vector<std::string> places = {"any"};
  std::vector<int> errors = {0};
  std::vector<bool> lasting = {false};

  Victims victims = Victims::kFirstOrLast;
  Expected expected = Expected::kEnds;
  bool names_victim = true;     // survivors must name it
  std::string not_known = "";   // what nobody can say in this row, so that no trial is judged by it
  bool checked = false;         // TESSERA_CHECKED
  bool says_own_error = false;  // the victim's text must have the system's words for the error
  // TESSERA_TIMEOUT of a trial is one of these.
  std::vector<int64_t> limits_s = {2};
  bool is_noticed = false;  // survivors must notice the fault before the limit: within 5 seconds
  int64_t gloo_trials = 0;  // of the full campaign
  int64_t mpi_trials = 0;
};

const std::vector<Row>& all_rows();
// Throws std::invalid_argument, with all names, if there is none.
const Row& row_named(const std::string& name);

}  // namespace tessera::faults
