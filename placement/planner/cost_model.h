#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/mesh/mesh.h"

namespace tessera {

// What a step of a plan costs along a mesh dimension.
struct Link {
  double microseconds = 0;           // of any step, however small
  double bytes_per_microsecond = 1;  // that a rank receives; 1000 is 1 GB/s
  friend bool operator==(const Link&, const Link&) = default;
};

// That a step over one mesh dimension, of which a rank received so many bytes, took so long.
struct LinkSample {
  int64_t mesh_dim = 0;
  double bytes = 0;
  double microseconds = 0;
};

// What plans are compared by. A step over ranks of which each receives at most `bytes` takes
//   link.microseconds + bytes / link.bytes_per_microsecond,
// and a plan the sum of its steps. A step over several mesh dimensions at once runs at the slowest of their links, in
// latency and in bandwidth. What does not communicate is free. A value, the same on every rank: ranks that plan
// differently hang.
struct CostModel {
  std::vector<Link> links;  // one a mesh dimension

  // Bytes alone: the time is the number of bytes, and fewer steps decide between equals.
  static CostModel bytes_only(int64_t mesh_ndim);
  // Gloo between processes of one host: 120 us a step, 2 GB/s a rank. Measured between 2 processes on 2 cores.
  static CostModel gloo(int64_t mesh_ndim);
  // GPUs of one host joined by NVLink (10 us, 200 GB/s), hosts by InfiniBand (20 us, 25 GB/s a GPU). A mesh dimension
  // is inside the hosts when all its groups are, ranks being numbered host by host.
  static CostModel nvlink_infiniband(const Mesh& mesh, int64_t ranks_per_host);

  // The links that fit measured times best, in the sense of least squares, with latencies of at least 0. A mesh
  // dimension of one rank needs no samples. To be the same on every rank, it must be made from the same samples on
  // every rank. Throws std::invalid_argument when a mesh dimension has samples of fewer than two numbers of bytes, or
  // its times do not grow with them; and on samples that are not numbers of at least 0, or of no mesh dimension.
  static CostModel fitted(const Mesh& mesh, std::span<const LinkSample> samples);

  Link over(std::span<const int64_t> mesh_dims) const;
  double microseconds(std::span<const int64_t> mesh_dims, double bytes) const;

  // "120 us + 2000 MB/s, 10 us + 25000 MB/s": a link for each mesh dimension.
  std::string to_string() const;
  friend bool operator==(const CostModel&, const CostModel&) = default;
};

// The inverse of to_string. Throws std::invalid_argument that shows the text.
CostModel parse_cost_model(std::string_view text);

// Throws std::invalid_argument, prefixed with `who`, unless `model` has one link a mesh dimension, each of a latency of
// at least 0 and a bandwidth above 0.
void check_cost_model(const CostModel& model, int64_t mesh_ndim, const std::string& who);

}  // namespace tessera
