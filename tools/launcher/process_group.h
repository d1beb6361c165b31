#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/tools/launcher/spawn.h"

namespace tessera {

enum class OutputStream { kStdout, kStderr };

// How one rank ended.
struct RankExit {
  int64_t rank = 0;
  int exit_code = 0;   // when signal is 0
  int signal = 0;      // the signal that killed it, or 0
  bool early = false;  // it exited, with whatever code, before ProcessGroupOptions::is_done

  bool failed() const { return exit_code != 0 || signal != 0 || early; }
  // What a shell would report: the exit code, or 128 + the signal; never 0 when it failed.
  int shell_code() const { return signal != 0 ? 128 + signal : exit_code == 0 && early ? 1 : exit_code; }
  // "rank 2 exited with code 3", "rank 2 was killed by signal 9", "rank 2 exited with code 0 before it was done"
  std::string to_string() const;

  friend bool operator==(const RankExit&, const RankExit&) = default;
};

struct ProcessGroupOptions {
  std::vector<std::string> command;                // program (looked up in PATH) and arguments
  int64_t size = 1;                                // ranks, all on this host
  std::string store_path;                          // the file in which the ranks meet; in a folder of the caller's
  std::map<std::string, std::string> environment;  // added to every rank's
  // What one rank alone gets besides, as a place in an MpiJob.
  std::function<std::map<std::string, std::string>(int64_t rank)> rank_variables;
  std::optional<std::chrono::milliseconds> time_limit;
  std::chrono::milliseconds grace{4000};  // for the other ranks to end by themselves after the first failure

  // How a rank is started: command, environment, process group; the ranks must be children of this process.
  std::function<Child(const std::vector<std::string>&, const std::vector<std::string>&, pid_t)> spawn = tessera::spawn;
  // Asked when a rank has exited: whether it did all that it was to do. One that did not has failed, also with code 0.
  std::function<bool(int64_t rank)> is_done;
  // Called with each line that a rank writes, without its newline.
  std::function<void(int64_t rank, OutputStream stream, std::string_view line)> on_line;
  // Asked all the time: a signal to pass on to the ranks, or 0. One that ends processes starts the grace time too.
  std::function<int()> take_signal;
};

struct ProcessGroupResult {
  std::optional<RankExit> failure;  // the first rank that failed
  bool timed_out = false;
  std::vector<int64_t> running;  // ranks that had not ended at the time limit

  bool ok() const { return !failure.has_value() && !timed_out; }
};

// Where a launcher writes that a rank was lost, for the other ranks to read: RankExit::to_string() of the first
// failure.
std::string lost_rank_file(const std::string& store_path);
// Where it writes of a rank that ended well while others still ran, RankExit::to_string(), for those that wait for it
// to join.
std::string ended_rank_file(const std::string& store_path, int64_t rank);

// Runs `size` processes of one program, each told its rank by environment variables (see rank_environment), and returns
// when all have ended. At the first failure it writes lost_rank_file(), gives the others `grace`, then sends SIGTERM,
// and SIGKILL a second later; at the time limit it sends them at once.
//
// No rank outlives the call, nor does anything that one started, in whatever session or process group: this process
// becomes the parent of what they leave behind (see Subreaper) and kills it. When this process is killed its ranks end
// too, and what they started but for what has left their process group (setsid). Standard input of the ranks is empty.
// Call it from a thread that lives until the call returns; calls from several threads take turns.
// Throws std::invalid_argument on an empty command or a size below 1, std::runtime_error when processes cannot be made.
ProcessGroupResult run_process_group(const ProcessGroupOptions& options);

}  // namespace tessera
