#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/tests/faults/outcome.h"
#include "tessera/tools/launcher/process_group.h"

namespace tessera::faults {

using Variables = std::map<std::string, std::string>;

struct RanksOptions {
  std::vector<std::string> arguments;  // of run_job
  int64_t size = 2;
  std::string store;
  std::string backend = "gloo";
  Variables environment = {};
  std::function<Variables(int64_t rank)> rank_variables = {};
  std::optional<std::chrono::milliseconds> stopped_limit = {};  // as in ProcessGroupOptions
};

struct Line {
  double time = 0;
  std::string text;
};

struct RanksRun {
  std::map<int64_t, std::vector<Line>> lines;  // keyed by rank
  std::map<int64_t, double> ended;             // the ranks that exited
  double all_ended = 0;
  ProcessGroupResult result;

  // Returns what follows `start` in the rank's lines that begin with it.
  std::vector<std::string> after(int64_t rank, const std::string& start) const;
  RankOutcome outcome_of(int64_t rank) const;
  std::optional<double> fault_time() const;
  // Returns all lines, each with its rank and the seconds since the fault, or since the first line.
  std::string output() const;
};

// Returns the seconds of CLOCK_MONOTONIC.
double now_seconds();

// Runs ranks of the job, forked from a copy of this program, and waits for them. Ranks that do not end by themselves
// after the first failure are ended some seconds after the time that they have.
RanksRun run_ranks(const RanksOptions& options);

}  // namespace tessera::faults
