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
// each rank, and in it a thread for each of its lanes: users' spans, modules, operators, and the collectives of each
// mesh dimension. Times are microseconds since the first
// record, whose time is in "otherData". What is selected shows the path, the operator, the bytes, the group's ranks,
// and the collective's number in its group. A process whose first record is not number 1, since earlier ones were
// overwritten, says so in its name: "rank 0, from its record 313 on".
std::string chrome_trace(const std::vector<Record>& records);

// Gathers the records of all ranks of `mesh` and writes their trace on its first rank; the file appears all at once.
// Communicates as gather_records, and then one all_reduce of 40 bytes per mesh dimension: if the file cannot be
// written, every rank throws std::runtime_error with the path and the system's text, or std::invalid_argument where the
// path is a link, a folder, a pipe or a device. In a fake world this rank writes its own records.
void write_trace(const DeviceMesh& mesh, const std::string& path);

// Sums up the collectives of one kind on one mesh dimension. Times are the host's: over NCCL a collective ends for it,
// and so does the wait, when the host has queued the wait.
struct CollectiveTotal {
  std::string name;  // "all_reduce"
  std::string mesh_dim;
  int64_t count = 0;
  int64_t bytes = 0;         // sizes of the inputs
  int64_t in_flight_ns = 0;  // from start to end
  int64_t waited_ns = 0;     // the part of it that the rank waited for the result
  friend bool operator==(const CollectiveTotal&, const CollectiveTotal&) = default;
};
// Returns the totals of the collectives among `records` that have ended, in the order of first appearance. They are of
// these records alone: what a full ring has lost is not in them.
std::vector<CollectiveTotal> collective_totals(const std::vector<Record>& records);
// Prints a table: kind, mesh dimension, count, bytes, ms in flight, ms waited. The totals are of the records that they
// were made from alone.
std::string to_string(const std::vector<CollectiveTotal>& totals);

// Says how often a rank was the last to begin a collective, and how long others had waited for it by then.
struct RankLateness {
  int64_t rank = 0;
  int64_t collectives = 0;  // that it and at least one other rank have records of
  int64_t last = 0;         // of how many of them it was the last to begin
  int64_t waited_ns = 0;    // how long others had waited in these when it began them, summed over the others
  friend bool operator==(const RankLateness&, const RankLateness&) = default;
};
// Compares when ranks began each collective of which at least two of them have records. Returns one value for each rank
// that has such records, first that for which others waited longest. `gathered` are records of several ranks in the
// times of one clock, as gather_records returns them.
//
// The rank that began a collective last counts as the last one; of several that began it then, the first in `gathered`.
// Each other rank adds to its waited_ns the time from when that one began to wait (Record::waited_from_ns) until the
// last one began; it adds nothing where it began to wait later or never. So a rank that works while its collective is
// in flight waits for nobody. Ranks whose records of a collective were overwritten do not count in it.
//
//   all_reduce of ranks 0, 1, 2: they begin at 10, 30 and 70 and wait from 15, 90 and 71
//   -> rank 2 was the last; rank 0 had waited for it for 55, rank 1 for nothing
//
// Times are the host's. Over NCCL a host only queues the collective and the wait: the sum says how much later the last
// host queued it than others queued their waits, and not how long a GPU stood still.
std::vector<RankLateness> late_ranks(const std::vector<Record>& gathered);
// Prints a table, one row for each rank in the given order: rank, collectives, came last, ms that others waited.
std::string to_string(const std::vector<RankLateness>& ranks);

}  // namespace tessera
