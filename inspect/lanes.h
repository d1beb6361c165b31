#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/mesh/recorder.h"

namespace tessera {

// Describes what a lane shows from begin_ns to end_ns: a record, or the operators that used one module's parameters.
struct LaneSlice {
  std::string name;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  int64_t record = -1;   // the index of its record; -1: it stands for several
  bool is_open = false;  // its record, or one of those, has not ended
};

// Holds slices of one rank that a viewer draws in one row.
//
// Invariants:
//   - Slices ascend by begin, and of equal begins the longer one comes first.
//   - Two slices nest or do not overlap. In a lane of collectives none overlap.
struct Lane {
  int64_t rank = 0;
  std::string name;  // "spans", "modules", "operators", "collectives on tp"
  RecordKind kind = RecordKind::kSpan;
  std::vector<LaneSlice> slices;
};

// Returns the lanes of records of any ranks, by rank: users' spans, modules, operators, and a lane of collectives for
// each mesh dimension in the order of first use. Slices that would break the invariant go to a lane "collectives on tp
// (2)". A record that has not ended goes on to the last time that its rank has recorded, be it a begin, an end or the
// begin of a wait.
//
// Hooked modules have records. In the lane of modules other modules stand too: operators in a row, forward or backward,
// that used parameters of one module, which a style placed, are a slice of that module.
std::vector<Lane> lanes_of(const std::vector<Record>& records);

}  // namespace tessera
