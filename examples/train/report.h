#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/examples/train/metrics.h"
#include "tessera/examples/train/step_times.h"

namespace train {

// Counts collectives of one kind over one mesh dimension, in one step of one rank.
struct CollectiveCount {
  std::string kind;
  std::string mesh_dim;
  int64_t count = 0;
  int64_t bytes = 0;
};

// Is a moment of a step, in seconds since it began, at which a collective began.
struct CollectiveMoment {
  double second = 0;
  std::string kind;
  std::string mesh_dim;
};

// Holds what the page shows.
struct Report {
  std::string title;
  std::string outcome;  // the lines that the program ends with
  std::string written;  // text of the model
  std::string config;
  std::string layout;  // the table of what rank 0 holds
  std::vector<Metric> metrics;
  std::vector<CollectiveCount> collectives;
  std::vector<StepTimes> times;           // of each rank, in one step
  std::vector<CollectiveMoment> moments;  // of rank 0, in the same step
};

// Returns a page that needs no other file and no network: loss against tokens, the time line of a step, collectives by
// kind, what lies where, the text that the model wrote, and the options.
std::string to_html(const Report& report);

}  // namespace train
