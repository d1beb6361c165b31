#include "tessera/tests/faults/rows.h"

#include <cerrno>
#include <stdexcept>

#include <fmt/format.h>

namespace tessera::faults {
namespace {

const std::vector<std::string> kEverywhere = {"start", "groups", "collective", "hook",       "forward", "backward",
                                              "async", "save",   "load",       "destructor", "exit"};
const std::vector<std::string> kInCode = {"hook", "backward", "async", "destructor"};

const char* const kNoStore = "where a rank can neither open the store's folder nor make a file there: its words";

std::vector<Row> make_rows() {
  std::vector<Row> rows;
  rows.push_back({.name = "kill",
                  .faults = {"kill"},
                  .points = kEverywhere,
                  .limits_s = {2, 20},
                  .is_noticed = true,
                  .gloo_trials = 500,
                  .mpi_trials = 200});
  rows.push_back({.name = "stop", .faults = {"stop"}, .points = kEverywhere, .gloo_trials = 150, .mpi_trials = 30});
  rows.push_back({.name = "stop_go",
                  .faults = {"stop_go"},
                  .points = kEverywhere,
                  .expected = Expected::kEndsWell,
                  .limits_s = {3},
                  .gloo_trials = 150,
                  .mpi_trials = 30});
  rows.push_back({.name = "throw",
                  .faults = {"throw"},
                  .points = kInCode,
                  .victims = Victims::kAny,
                  .limits_s = {2, 20},
                  .is_noticed = true,
                  .gloo_trials = 50,
                  .mpi_trials = 20});
  rows.push_back({.name = "exit",
                  .faults = {"exit", "quit"},
                  .points = kInCode,
                  .victims = Victims::kAny,
                  .limits_s = {2, 20},
                  .is_noticed = true,
                  .gloo_trials = 50,
                  .mpi_trials = 20});
  rows.push_back({.name = "abort",
                  .faults = {"abort"},
                  .points = kInCode,
                  .victims = Victims::kAny,
                  .limits_s = {2, 20},
                  .is_noticed = true,
                  .gloo_trials = 50,
                  .mpi_trials = 20});
  // A full disk takes no new bytes, and no new file where that is drawn.
  rows.push_back({.name = "no_space",
                  .faults = {"error"},
                  .points = {"call"},
                  .calls = {"write", "pwrite", "create", "linkat", "fsync", "rename"},
                  .places = {"store", "states"},
                  .errors = {ENOSPC},
                  .victims = Victims::kAny,
                  .not_known = kNoStore,
                  .says_own_error = true,
                  .gloo_trials = 120,
                  .mpi_trials = 30});
  rows.push_back({.name = "full_disk",
                  .faults = {"error"},
                  .points = {"call"},
                  .calls = {"write", "pwrite"},
                  .places = {"store", "states"},
                  .errors = {ENOSPC},
                  .lasting = {true},
                  .victims = Victims::kAny,
                  .not_known = kNoStore,
                  .says_own_error = true,
                  .gloo_trials = 50,
                  .mpi_trials = 20});
  rows.push_back({.name = "io_error",
                  .faults = {"error"},
                  .points = {"call"},
                  .calls = {"write", "pwrite", "open", "create", "linkat", "fsync", "rename"},
                  .places = {"store", "states"},
                  .errors = {EIO},
                  .victims = Victims::kAny,
                  .not_known = kNoStore,
                  .says_own_error = true,
                  .gloo_trials = 50,
                  .mpi_trials = 20});
  rows.push_back({.name = "no_descriptor",
                  .faults = {"error"},
                  .points = {"call"},
                  .calls = {"open", "create", "socket"},
                  .places = {"store", "states", "other"},
                  .errors = {EMFILE},
                  .lasting = {false, true},
                  .victims = Victims::kAny,
                  // Gloo calls a socket that it cannot make an address that it cannot resolve. MPI ends all ranks
                  // without a word when one cannot start it. A rank whose early opens fail computes other last bits.
                  .not_known = "outside the store and the states: whose failure it was, its words and the last bits of "
                               "values, since other libraries make those calls; where a rank can make no file of the "
                               "store: its words",
                  .gloo_trials = 80,
                  .mpi_trials = 20});
  rows.push_back({.name = "torn_store",
                  .faults = {"kill"},
                  .points = {"call"},
                  .calls = {"create", "write", "linkat", "unlinkat"},
                  .places = {"store"},
                  .victims = Victims::kAny,
                  .gloo_trials = 80,
                  .mpi_trials = 20});
  rows.push_back({.name = "kill_in_save",
                  .faults = {"kill"},
                  .points = {"call"},
                  .places = {"states"},
                  .victims = Victims::kAny,
                  .gloo_trials = 900,
                  .mpi_trials = 200});
  rows.push_back({.name = "two_savers",
                  .kind = Kind::kTwoFolderUsers,
                  .faults = {"kill"},
                  .points = {"call"},
                  .places = {"states"},
                  .gloo_trials = 100});
  rows.push_back({.name = "second_job",
                  .kind = Kind::kSecondJob,
                  .victims = Victims::kNone,
                  .expected = Expected::kEnds,
                  .limits_s = {3},
                  .gloo_trials = 10});
  rows.push_back({.name = "stale_store",
                  .kind = Kind::kStaleStore,
                  .faults = {"kill"},
                  .points = {"groups", "collective", "save", "load"},
                  .victims = Victims::kNone,
                  .expected = Expected::kEndsWell,
                  .gloo_trials = 10});
  rows.push_back({.name = "port_taken",
                  .kind = Kind::kPortTaken,
                  .victims = Victims::kNone,
                  .names_victim = false,
                  .not_known = "which rank is at fault: another program has the port",
                  .gloo_trials = 10});
  rows.push_back({.name = "launcher_signal",
                  .kind = Kind::kLauncherSignal,
                  .faults = {"INT", "TERM", "KILL"},
                  .points = {"start", "run", "end"},
                  .victims = Victims::kNone,
                  .names_victim = false,
                  .not_known = "who is at fault: the launcher itself is ended",
                  .gloo_trials = 60,
                  .mpi_trials = 15});
  rows.push_back({.name = "launcher_output",
                  .kind = Kind::kLauncherOutput,
                  .faults = {"closed", "stalled"},
                  .points = {"start", "run", "end"},
                  .victims = Victims::kNone,
                  .names_victim = false,
                  .not_known = "who is at fault: the launcher itself is ended",
                  .gloo_trials = 40,
                  .mpi_trials = 10});
  rows.push_back({.name = "mismatch_checked",
                  .faults = {"order", "dtype", "shape", "operation"},
                  .points = {"collective"},
                  .victims = Victims::kAny,
                  .checked = true,
                  .gloo_trials = 30,
                  .mpi_trials = 10});
  rows.push_back({.name = "mismatch",
                  .faults = {"order", "dtype", "shape", "operation"},
                  .points = {"collective"},
                  .victims = Victims::kAny,
                  .expected = Expected::kIsOver,
                  .names_victim = false,
                  .not_known = "which rank differs, what numbers come of it, and whether Gloo aborts a process: only "
                               "Checked compares the calls",
                  .gloo_trials = 30,
                  .mpi_trials = 10});
  rows.push_back({.name = "clean",
                  .victims = Victims::kNone,
                  .expected = Expected::kEndsWell,
                  .gloo_trials = 1000,
                  .mpi_trials = 100});
  return rows;
}

}  // namespace

const std::vector<Row>& all_rows() {
  static const std::vector<Row> rows = make_rows();
  return rows;
}

const Row& row_named(const std::string& name) {
  std::string names;
  for (const Row& row : all_rows()) {
    if (row.name == name) return row;
    names += " " + row.name;
  }
  throw std::invalid_argument(fmt::format("there is no row '{}'; the rows are:{}", name, names));
}

}  // namespace tessera::faults
