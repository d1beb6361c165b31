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

// What a benchmark of real ranks, ours and PyTorch's, is told on its command line.
struct SidesArguments {
  std::vector<int64_t> ranks = {2, 4};
  std::string backend = "gloo";  // of ours; the peer has Gloo
  std::string json;
  std::string launch;
  std::string peer_script;
  std::string rank_at;  // not empty: be a rank of ours
  int rounds = 51;
  double round_ms = 30;
  bool quick = false;
  bool check = false;
};
// Adds them as options; `peer_variable` of the environment names the peer's program.
void add_options(CLI::App& app, SidesArguments& arguments, const char* peer_variable);
// Throws std::invalid_argument where something is missing.
void check_arguments(const SidesArguments& arguments);

// The ranks of both sides, each one thread and one process; those of one wait while the other is measured.
struct TwoSides {
  TwoSides(const SidesArguments& arguments, int64_t size);
  Ranks ours;
  Ranks peer;
};

// The slowest rank's answer, in microseconds.
double slowest(Ranks& ranks, const std::string& line);

// One variant of what is measured.
struct Variant {
  std::string name;  // of ours what its ranks are told
  bool peer = false;
};
// Microseconds per call of each variant by rounds, after one that is not counted. In every round each variant is
// measured once, in an order drawn anew, so that none is always behind the same other, with so many calls of its own
// that it takes `round_ms` or so.
std::map<std::string, std::vector<double>> interleaved(TwoSides& sides, const std::vector<Variant>& variants,
                                                       const SidesArguments& arguments);

// `body`, whose result is the exit status, with what it throws written out under `name`.
int run_main(const char* name, const std::function<bool()>& body);

}  // namespace tessera::bench
