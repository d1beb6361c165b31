#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/tools/launcher/rank_outputs.h"
#include "tessera/tools/launcher/spawn.h"

namespace tessera {

// Says how one rank ended.
struct RankExit {
  int64_t rank = 0;
  int exit_code = 0;   // when signal is 0
  int signal = 0;      // the signal that killed it, or 0
  bool early = false;  // it exited, with any code, before ProcessGroupOptions::is_done returned true
  // How long it had been stopped when it was killed for that, or 0.
  std::chrono::seconds stopped_for{0};

  bool failed() const { return exit_code != 0 || signal != 0 || early; }
  // Returns the code that a shell would report: the exit code, or 128 + the signal. Never 0 when the rank failed.
  int shell_code() const { return signal != 0 ? 128 + signal : exit_code == 0 && early ? 1 : exit_code; }
  // Returns "rank 2 exited with code 3", "rank 2 was killed by signal 9", "rank 2 exited with code 0 before it was
  // done" or "rank 2 was stopped for 302 s and then killed".
  std::string to_string() const;

  friend bool operator==(const RankExit&, const RankExit&) = default;
};

struct ProcessGroupOptions {
  std::vector<std::string> command;                // program (looked up in PATH) and arguments
  int64_t size = 1;                                // number of ranks, all on this host
  std::string store_path;                          // file of the ranks' store, in a folder of the caller's
  std::map<std::string, std::string> environment;  // variables added to every rank's environment
  // Returns more variables for one rank, such as those of its place in an MpiJob.
  std::function<std::map<std::string, std::string>(int64_t rank)> rank_variables;
  std::optional<std::chrono::milliseconds> time_limit;
  // A rank that has been stopped (by SIGSTOP or SIGTSTP, not by a debugger) for so long is killed, and has failed. Time
  // in which this process was stopped too does not count.
  std::optional<std::chrono::milliseconds> stopped_limit;
  std::chrono::milliseconds grace{4000};  // time for the other ranks to end by themselves after the first failure
  // Is the time for the ranks to end by themselves after a signal that asks them to, and after the time limit.
  std::chrono::milliseconds signal_grace{4000};

  // Starts a rank, given command, environment and process group. The rank must be a child of this process.
  std::function<Child(const std::vector<std::string>&, const std::vector<std::string>&, pid_t)> spawn = tessera::spawn;
  // Called when a rank has exited; returns whether it had finished its work. If not, it has failed, even with code 0.
  std::function<bool(int64_t rank)> is_done;
  // Is where the ranks' output goes. Its functions must not wait, since ranks are watched by the same thread.
  OutputSinks sinks;
  // Called repeatedly; returns a signal to pass on to the ranks, or 0. Signals that ask to end also start the time of
  // signal_grace.
  std::function<int()> take_signal;
};

struct ProcessGroupResult {
  std::optional<RankExit> failure;  // the first rank that failed
  bool timed_out = false;
  std::vector<int64_t> running;  // ranks that had not ended at the time limit

  bool ok() const { return !failure.has_value() && !timed_out; }
};

// Returns the file to which a launcher writes RankExit::to_string() of the first failure, for the other ranks to read.
std::string lost_rank_file(const std::string& store_path);
// Returns the file to which it writes RankExit::to_string() of a rank that ended without a failure while others still
// ran, for the ranks that wait for it to join.
std::string ended_rank_file(const std::string& store_path, int64_t rank);

// Runs `size` processes of one program, which get their ranks from environment variables (see rank_environment), and
// returns when all have ended. At the first failure it writes lost_rank_file(), waits for `grace`, then sends SIGTERM,
// and SIGKILL a second later. At the time limit it sends SIGTERM at once, and both again after `signal_grace`. Where a
// rank fails, or the time limit passes, after a signal, ranks are ended at the earlier of both times.
//
// No rank outlives the call, nor does any process that a rank started, in any session or process group: this process
// becomes the parent of those that remain (see Subreaper) and kills them. When this process is killed, its ranks end
// too, and so do the processes that they started, except those that have both left their process group (setsid) and
// changed TESSERA_STORE, by which the others are known (see spawn_watchdog). Standard input of the ranks is empty. Call
// it from a thread that lives until the call returns; calls from several threads run one after the other.
// Throws std::invalid_argument on an empty command or a size below 1, std::runtime_error when processes cannot be made,
// when there is no space for those files (it is reserved before the ranks start, so that they can fill the disk), or
// when this process ignores SIGCHLD, so that it cannot know how a rank has ended.
ProcessGroupResult run_process_group(const ProcessGroupOptions& options);

}  // namespace tessera
