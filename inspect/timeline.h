#pragma once

#include <string>
#include <vector>

#include "tessera/mesh/recorder.h"

namespace tessera {

struct TimelineOptions {
  double width = 900;    // of the whole picture, in pixels; more where the lanes' names alone need it
  int64_t begin_ns = 0;  // shows what happened from here
  int64_t end_ns = 0;    // to here; 0: to the last record's end
  std::string title = "a time line";
};

// Draws records as an SVG: below each rank its lanes (users' spans, modules, operators, and the collectives of each
// mesh dimension), each as one row of bars, where what nests is drawn over what is around it, and names where they fit.
// Below stands a scale in milliseconds. Bars that are less than half a pixel wide and touch the one before are left
// out; a record that has not ended is drawn even if nothing was recorded after it began. It reads nothing but its
// arguments. To draw one training step, give begin_ns and end_ns of the Record of its span.
std::string timeline_svg(const std::vector<Record>& records, const TimelineOptions& options = {});

}  // namespace tessera
