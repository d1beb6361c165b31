#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

// Holds the arguments of tools/launch, whose --help describes them.
struct LaunchOptions {
  int64_t size = 0;
  double time_limit_s = 0;  // 0: no limit
  double grace_s = 5;
  int64_t restarts = 0;   // the most that follow the first attempt
  int64_t min_ranks = 0;  // 0: each attempt has `size` ranks
  bool is_bare = false;
  std::string backend;  // empty when it is not given
  std::vector<std::string> command;
};

// Reads the arguments; the first one is the launcher's program, by whose name the help calls it. Where they are wrong
// or ask for help, prints what there is to say, stores the exit code in `exit_code` and returns nothing.
std::optional<LaunchOptions> parse_launch_options(int argc, char** argv, int& exit_code);

}  // namespace tessera
