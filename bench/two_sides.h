#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tessera/bench/ranks.h"

namespace CLI {
class App;
}  // namespace CLI

namespace tessera::bench {

// Holds the command line of a benchmark of real ranks, ours and the peer's: PyTorch's, or one process of this program.
struct SidesArguments {
  std::vector<int64_t> ranks = {2, 4};
  std::string backend = "gloo";  // backend of our ranks; the peer uses Gloo
  std::string json;
  std::string launch;
  std::string peer_script;
  std::string rank_at;    // not empty: this process is one of our ranks, or the peer
  bool own_peer = false;  // the peer is one process of this program
  int rounds = 51;
  double round_ms = 30;
  bool quick = false;
  bool check = false;
};
// Adds them as options; `peer_variable` of the environment names the peer's program. Without one the peer is our own.
void add_options(CLI::App& app, SidesArguments& arguments, const char* peer_variable = nullptr);
// Throws std::invalid_argument when the launcher or the peer's program is missing.
void check_arguments(const SidesArguments& arguments);

// Holds the ranks of both sides. Each is a process with one thread. The ranks of one side wait while the other is
// measured.
struct TwoSides {
  TwoSides(const SidesArguments& arguments, int64_t size);
  Ranks ours;
  Ranks peer;
};

// Returns the answer of the slowest rank, in microseconds.
double slowest(Ranks& ranks, const std::string& line);

// Describes one variant of what is measured.
struct Variant {
  std::string name;  // also the command to the ranks
  bool peer = false;
};
// Returns the microseconds per call of each variant, by round. Every round measures each variant once, in a new random
// order, so that no variant always follows the same other one. A measurement makes as many calls as take about
// `round_ms`, by a first call that is not counted.
std::map<std::string, std::vector<double>> interleaved(TwoSides& sides, const std::vector<Variant>& variants,
                                                       const SidesArguments& arguments);

// Runs `body` and returns the program's exit status: 0 if it returns true. Prints an exception with `name`, and returns
// 1.
int run_main(const char* name, const std::function<bool()>& body);

}  // namespace tessera::bench
