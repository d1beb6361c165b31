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
// Whoever reads the output may stall: ranks that write more then wait, while signals, the time limit and the ends of
// ranks are seen as ever. When ranks have ended by themselves without a failure, run() waits for the reader until a
// signal asks to end or the time limit passes; otherwise it gives the reader two seconds and drops the rest.
class Job {
 public:
  Job(const LaunchOptions& options, Console& console, SignalQueue& signals);

  // Returns the launcher's exit code.
  int run();

 private:
  ProcessGroupResult run_ranks();
  ProcessGroupOptions group_options(const std::string& store_path);
  int take_signal(const std::string& store_path);
  int exit_code(const ProcessGroupResult& result);
  int finish(int code);
  bool is_over();

  const LaunchOptions& options_;
  Console& console_;
  SignalQueue& signals_;
  std::optional<std::chrono::steady_clock::time_point> limit_;
  int end_signal_ = 0;      // the signal that asked the job to end
  bool is_broken_ = false;  // the ranks were asked to end since output could no longer be written
};

}  // namespace tessera
