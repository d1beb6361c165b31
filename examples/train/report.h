#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/examples/train/metrics.h"

namespace train {

// Is a layout that parameters of the model have.
struct ParameterLayout {
  std::string parameter;  // the first that has it
  int64_t others = 0;     // the number of the others
  std::string picture;    // an SVG
};

// Holds what the page shows.
struct Report {
  std::string title;
  std::string outcome;  // the lines that the program ends with
  std::string written;  // text of the model
  std::string config;
  std::string weights;                   // the table of what rank 0 holds
  std::vector<ParameterLayout> layouts;  // each once
  std::vector<Metric> metrics;
  std::string time_line;    // an SVG of one step on all ranks
  std::string collectives;  // a table of those of the same step, on rank 0
};

// Returns a page that needs no other file and no network: loss against tokens, the time line of a step, collectives by
// kind, what lies where, the text that the model wrote, and the options. SVGs are taken as they are; the rest is
// escaped.
std::string to_html(const Report& report);

}  // namespace train
