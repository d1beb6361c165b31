#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <c10/util/FunctionRef.h>

#include "tessera/mesh/mesh.h"

namespace tessera {

// Holds what a step of a plan costs along a mesh dimension.
struct Link {
  double microseconds = 0;           // per step, however few bytes it moves
  double bytes_per_microsecond = 1;  // received by each rank, while all receive as much; 1000 is 1 GB/s
  friend bool operator==(const Link&, const Link&) = default;
};

// Holds a measurement: a step over one mesh dimension in which a rank received `bytes` took `microseconds`.
struct LinkSample {
  int64_t mesh_dim = 0;
  double bytes = 0;
  double microseconds = 0;
};

// Gives the times by which plans are compared. A step in which each rank receives at most `bytes` takes
//   link.microseconds + bytes / link.bytes_per_microsecond,
// and a plan takes the sum of its steps. A step over several mesh dimensions at once has the largest latency of their
// links, and what a rank receives from another crosses the slowest link of the mesh dimensions along which the two
// differ. On {host: 2, gpu: 4}, an all_gather over both in which each rank has 1 MB brings it 4 MB over the link of
// `host` and 3 MB over that of `gpu`: the times of the two add up. The ranks that agree along a mesh dimension and all
// slower ones, such as those of a host, share its link: what counts is the mean of what they receive over it. A step
// without communication takes no time. The model must be the same on every rank: ranks that plan differently hang.
struct CostModel {
  std::vector<Link> links;  // one per mesh dimension

  // Counts bytes alone: the time is the number of bytes, and of equal plans the one with fewer steps wins.
  static CostModel bytes_only(int64_t mesh_ndim);
  // This is for Gloo between processes of one host: 120 us per step, 2 GB/s per rank, as measured between 2 processes
  // on 2 cores.
  static CostModel gloo(int64_t mesh_ndim);
  // This is for GPUs joined by NVLink within a host (10 us, 200 GB/s) and by InfiniBand between hosts (20 us, 25 GB/s
  // per GPU). A mesh dimension is within hosts if all its groups are; ranks are numbered host by host.
  static CostModel nvlink_infiniband(const Mesh& mesh, int64_t ranks_per_host);

  // Fits a link per mesh dimension to measured times by least squares, with latencies of at least 0. A mesh dimension
  // of size 1 needs no samples. Call it with the same samples on every rank, so that the result is the same on every
  // rank. Throws std::invalid_argument when a mesh dimension has samples of fewer than two message sizes, when its
  // times do not grow with the bytes, and on samples with numbers below 0 or of a mesh dimension that the mesh does not
  // have.
  static CostModel fitted(const Mesh& mesh, std::span<const LinkSample> samples);

  // Returns the largest latency and the smallest bandwidth of these mesh dimensions.
  Link over(std::span<const int64_t> mesh_dims) const;
  // Returns the time of a step over `mesh_dims` (a bit for each). received(slow) gives the bytes that ranks receive
  // from ranks that differ from them along some of the mesh dimensions `slow`: the mean over the ranks that agree along
  // all of these, where it is largest. For each bandwidth it is called once, with all mesh dimensions that are no
  // faster; so the last call is for all mesh dimensions, and means the rank that receives most.
  double microseconds(uint32_t mesh_dims, c10::function_ref<double(uint32_t)> received) const;

  // Returns one link per mesh dimension, such as "120 us + 2000 MB/s, 10 us + 25000 MB/s".
  std::string to_string() const;
  friend bool operator==(const CostModel&, const CostModel&) = default;
};

// Is the inverse of to_string. Throws std::invalid_argument that shows the text.
CostModel parse_cost_model(std::string_view text);

// Throws std::invalid_argument, prefixed with `who`, unless `model` has one link per mesh dimension, each with a
// latency of at least 0 and a bandwidth above 0.
void check_cost_model(const CostModel& model, int64_t mesh_ndim, const std::string& who);

}  // namespace tessera
