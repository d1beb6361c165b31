#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace tessera::testing {

struct LaunchOutcome {
  int exit_code = 0;  // 1000 + the signal if the launcher was killed
  std::string out;
  std::string err;
  double seconds = 0;
};

// Returns the content of a file, or "" where there is none.
std::string content_of(const std::string& path);

// Looks every 10 ms, for 10 seconds, whether the condition holds. Returns whether it came to hold.
bool wait_until(const std::function<bool()>& holds);

// Returns how long `body` takes, in seconds.
double seconds_of(const std::function<void()>& body);

// Starts a launcher whose output goes to the files "out" and "err" in `folder`, or into what stands there.
pid_t start_launch(const std::vector<std::string>& arguments, const std::string& folder);

// Waits 10 seconds until the child ends. Returns its exit code, or 1000 + the signal that ended it; kills a child that
// has not ended, and returns -1.
int wait_or_kill(pid_t child);

// Runs a launcher until it ends.
LaunchOutcome launch(const std::vector<std::string>& arguments);
LaunchOutcome launch_script(const std::string& ranks, const std::string& script);

}  // namespace tessera::testing
