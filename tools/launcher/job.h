#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "tessera/tools/launcher/console.h"
#include "tessera/tools/launcher/launch_options.h"
#include "tessera/tools/launcher/process_group.h"
#include "tessera/tools/launcher/signal_queue.h"

namespace tessera {

// Runs the ranks of one call of tools/launch.
//
// When a rank has failed (its exit code is not 0, or a signal killed it) and the others were ended, all ranks are
// started again, at most LaunchOptions::restarts times. A rank that is stopped for good makes the others fail at their
// own limit, TESSERA_TIMEOUT, and is killed with them; at the latest it is killed two seconds after that limit, whether
// anybody waits for it or not. Each attempt has a folder, a store and, over MPI, an MpiJob of its own, so nothing of
// the one before reaches it. With LaunchOptions::min_ranks each restart has one rank fewer than the attempt before, but
// at least that many. Neither the time limit, which holds for all attempts together, nor a signal that asks to end, nor
// output that cannot be written any more is followed by a restart. Where the time limit passes, or such a signal comes,
// while mpirun still prepares places for ranks, none is started. A SIGUSR1 or SIGUSR2 that comes between two attempts,
// or during that, is dropped: passed on later, it would end ranks that have no handler for it yet.
//
// Where restarts are allowed, ranks get the variables of torchrun: TORCHELASTIC_RESTART_COUNT, 0 in the first attempt,
// TORCHELASTIC_MAX_RESTARTS, and TORCHELASTIC_RUN_ID, which is the same in all attempts of this job and in no other
// job.
//
// Whoever reads the output may stall: ranks that write more then wait, while signals, the time limit and the ends of
// ranks are seen as ever. When ranks have ended by themselves without a failure, run() waits for the reader until a
// signal asks to end or the time limit passes; otherwise it gives the reader two seconds and drops the rest.
class Job {
 public:
  Job(const LaunchOptions& options, Console& console, SignalQueue& signals);

  // Returns the launcher's exit code.
  int run();

 private:
  int run_attempts();
  ProcessGroupResult run_ranks();
  ProcessGroupOptions group_options(const std::string& store_path);
  int take_signal(const std::string& store_path);
  int exit_code(const ProcessGroupResult& result) const;
  std::string outcome(const ProcessGroupResult& result) const;
  int finish(int code);
  bool is_over();
  std::string why_over();
  int over_code() const;

  const LaunchOptions& options_;
  Console& console_;
  SignalQueue& signals_;
  const std::string id_;
  int64_t size_ = 0;     // ranks of this attempt
  int64_t restart_ = 0;  // the number of this attempt's restart; 0 is the first attempt
  std::optional<std::chrono::steady_clock::time_point> limit_;
  int end_signal_ = 0;      // the signal that asked the job to end
  bool is_broken_ = false;  // the ranks were asked to end since output could no longer be written
};

}  // namespace tessera
