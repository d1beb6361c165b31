#pragma once

#include <functional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace tessera::bench {

// One figure, in microseconds a call: the median over rounds, and the middle half of them.
struct Figure {
  double median = 0;
  double low = 0;   // first quartile
  double high = 0;  // third quartile
};
Figure figure_of(std::vector<double> samples);

// Microseconds of one call of `body`, averaged over `calls`.
double time_calls(const std::function<void()>& body, int calls);

// A program that measures the peer: it reads "NAME CALLS" lines and answers each with one number, the microseconds of a
// call of that name averaged over so many. Kept open, so that its measurements can be taken in turn with ours.
class Peer {
 public:
  // Throws std::runtime_error when the program cannot be started.
  explicit Peer(const std::vector<std::string>& command);
  ~Peer();
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;
  // Throws std::runtime_error with the peer's words when it does not answer with a number.
  double ask(const std::string& name, int calls);

 private:
  int to_ = -1;
  int from_ = -1;
  int pid_ = -1;
  std::string pending_;
};

// What is measured under one name. An absent function (no plain operator) measures 0.
struct Subject {
  std::string name;
  std::function<void()> ours;
  std::function<void()> plain;
  bool peer = true;  // false: the peer has no such thing, and its figures are 0
  bool peer_plain = true;
  int fewer = 1;  // so many times fewer calls a round, of what is slow
};
struct Row {
  std::string name;
  Figure ours, plain, peer, peer_plain;
};

// Measures each subject in `rounds` rounds, each of ours, plain, peer's, peer's plain in turn, so that the machine's
// drift meets all alike. The peer answers to NAME and to "plain_" + NAME.
std::vector<Row> measure(const std::vector<Subject>& subjects, Peer& peer, int rounds, int calls);

// What we want to hold, and whether it did.
struct Goal {
  std::string text;
  bool met = false;
};
// A line each, "met" or "missed"; whether all were met.
bool print_goals(const std::vector<Goal>& goals);

// {"benchmark": name, "rows": [{"name", "ours_us", "plain_us", "peer_us", "peer_plain_us", and quartiles}]}
void write_json(const std::string& path, const std::string& benchmark, const std::vector<Row>& rows);
// The same of rows that have a name and other figures.
void write_json(const std::string& path, const std::string& benchmark, const nlohmann::json& rows);

}  // namespace tessera::bench
