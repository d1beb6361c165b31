#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/recorder.h"

namespace tessera {

// Returns the records of all ranks of `mesh` on the mesh's first rank, by rank, each rank's oldest first; on every
// other rank an empty list. Each World's own records are `world.recorder().records()`, which needs no communication.
//
// Times are those of the first rank's clock: if what barriers allow shows that a rank's clock differs, its times are
// moved by the least that agrees with them. Where clocks agree, as on one host, they are left as they are.
//
// It is collective over all mesh dimensions as one (mesh.merged): eight barriers, two all_gathers of 128 and 8 bytes
// per rank, and an all_to_all in which each rank sends its records (100 to 200 bytes each) to the first. The
// collectives of this call are not among the records. A rank outside the mesh returns at once. In a fake world only
// this rank's records are there.
std::vector<Record> gather_records(const DeviceMesh& mesh);

// Returns records as a trace in Chrome's JSON format, which Perfetto (https://ui.perfetto.dev) opens: a process for
// each rank, and in it a thread for each of its lanes (see inspect/lanes.h). Times are microseconds since the first
// record. What is selected shows the path, the operator, the bytes, the group's ranks, and the collective's number
// in its group.
std::string chrome_trace(const std::vector<Record>& records);

// Gathers the records of all ranks of `mesh` and writes their trace on its first rank; the file appears all at once.
// Communicates as gather_records, and then one all_reduce of 40 bytes per mesh dimension: if the file cannot be
// written, every rank throws std::runtime_error with the path and the system's text.
void write_trace(const DeviceMesh& mesh, const std::string& path);

// Sums up the collectives of one kind on one mesh dimension.
struct CollectiveTotal {
  std::string name;  // "all_reduce"
  std::string mesh_dim;
  int64_t count = 0;
  int64_t bytes = 0;         // sizes of the inputs
  int64_t in_flight_ns = 0;  // from start to end
  int64_t waited_ns = 0;     // the part of it that the rank waited for the result
  friend bool operator==(const CollectiveTotal&, const CollectiveTotal&) = default;
};
// Returns the totals of the collectives among `records` that have ended, in the order of first appearance.
std::vector<CollectiveTotal> collective_totals(const std::vector<Record>& records);
// Prints a table: kind, mesh dimension, count, bytes, ms in flight, ms waited.
std::string to_string(const std::vector<CollectiveTotal>& totals);

}  // namespace tessera
