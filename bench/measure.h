#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace tessera::bench {

// Holds one figure in microseconds per call: the median over rounds, and the quartiles.
struct Figure {
  double median = 0;
  double low = 0;   // first quartile
  double high = 0;  // third quartile
};
Figure figure_of(std::vector<double> samples);

// Returns the microseconds of one call of `body`, averaged over `calls`.
double time_calls(const std::function<void()>& body, int calls);
// Does the same where the caches of the processor's core are cold: before each call, outside of its time, this writes
// to 4 MiB of memory and runs through 64 KiB of instructions.
double time_cold_calls(const std::function<void()>& body, int calls);
using TimeCalls = double(const std::function<void()>& body, int calls);

// Starts a program that measures the peer. It reads lines "NAME CALLS" and answers each with one number: the
// microseconds per call of NAME, averaged over CALLS. It runs until the Peer is destroyed, so that its measurements can
// alternate with ours.
class Peer {
 public:
  // Throws std::runtime_error when the program cannot be started.
  explicit Peer(const std::vector<std::string>& command);
  ~Peer();
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;
  // Throws std::runtime_error when the peer does not answer with a number; the peer's own error is on standard error.
  double ask(const std::string& name, int calls);

 private:
  int to_ = -1;
  int from_ = -1;
  int pid_ = -1;
  std::string pending_;
};

// Describes what is measured under one name. Where there is no plain operator, its figures are 0.
struct Subject {
  std::string name;
  std::function<void()> ours;
  std::function<void()> plain;
  bool peer = true;        // false: the peer has no such operator, or is not asked
  bool peer_plain = true;  // the same of its plain operator
  int fewer = 1;           // divides the number of calls per round, for slow subjects
};
struct Row {
  std::string name;
  Figure ours, plain;
  std::optional<Figure> peer, peer_plain;
};

// Measures each subject in `rounds` rounds. Each round measures ours, plain, the peer's, and the peer's plain in turn,
// so that drift of the machine affects all equally. The peer answers to NAME and to "plain_" + NAME.
// `settle` is called after each measurement, outside of its time: on a GPU it waits for what has been queued. `time`
// measures calls of this program.
std::vector<Row> measure(
    const std::vector<Subject>& subjects, Peer& peer, int rounds, int calls,
    const std::function<void()>& settle = [] {}, TimeCalls& time = time_calls);

// Describes a goal, and says whether it is met.
struct Goal {
  std::string text;
  bool met = false;
};
// Prints one line per goal, "met" or "missed". Returns whether all are met.
bool print_goals(const std::vector<Goal>& goals);

// Writes {"benchmark": name, "rows": [{"name", "ours_us", "plain_us", "peer_us", "peer_plain_us", and quartiles}]},
// without the figures of a peer that was not asked.
void write_json(const std::string& path, const std::string& benchmark, const std::vector<Row>& rows);
// Does the same for rows that have a name and other figures.
void write_json(const std::string& path, const std::string& benchmark, const nlohmann::json& rows);

}  // namespace tessera::bench
