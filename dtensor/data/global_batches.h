#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/mesh.h"
#include "tessera/placement/intervals.h"
#include "tessera/placement/placement.h"

namespace tessera {

// Says which samples of a dataset make the global batch of each step. This follows from the seed and the step alone: no
// mesh, rank or earlier step has a part in it. So a run that goes on after a stop, on any mesh, reads each sample that
// the run would have read, once.
//
// All epochs make one endless sequence of samples, and step k has those at k * batch_size .. (k + 1) * batch_size - 1.
// Each epoch has every sample once, in an order of its own (Permutation). A batch may begin in one epoch and end in the
// next; none is left out or filled up.
//
// A batch may be divided into micro-batches, whose gradients are accumulated, and each of these into the pieces of the
// ranks:
//   10 samples in 2 micro-batches -> the first 5, the last 5
//   5 samples over 3 ranks        -> 2, 2, 1, as Shard(0) cuts a tensor of 5 rows
//
// It is a value: compared by content, and safe to read from any thread. Nothing here communicates.
class GlobalBatches {
 public:
  // Throws std::invalid_argument unless 1 <= samples <= 2^62 and batch_size >= 1.
  GlobalBatches(int64_t samples, int64_t batch_size, uint64_t seed);

  int64_t samples() const { return samples_; }
  int64_t batch_size() const { return batch_size_; }
  uint64_t seed() const { return seed_; }

  // Returns the samples of the batch of `step`, numbers in [0, samples()). Throws std::invalid_argument when step < 0
  // or (step + 1) * batch_size() is above the largest int64_t.
  std::vector<int64_t> of_step(int64_t step) const;

  // Returns the samples of micro-batch `index` of `count`: those that torch.chunk's rule gives to part `index`, so that
  // the last ones may be smaller, or empty. Throws std::invalid_argument as of_step does, and unless
  // 0 <= index < count.
  std::vector<int64_t> micro_batch(int64_t step, int64_t index, int64_t count) const;

  // Returns those samples of a micro-batch that are the rank's at `coordinate`: the rows of its piece of a tensor of
  // the micro-batch, laid out as `placements` over `mesh`, {Shard(0), Replicate()} over {dp, tp} for instance. The
  // piece made of them goes to from_local with the same placements, and with the whole micro-batch's shape where
  // pieces are uneven. `coordinate` is mesh.coordinate_of(rank).
  // Throws std::invalid_argument as micro_batch does, and on placements that do not fit the mesh, cut another dimension
  // than 0, or are pending reductions.
  std::vector<int64_t> local(int64_t step, const Mesh& mesh, const Placements& placements,
                             std::span<const int64_t> coordinate, int64_t index = 0, int64_t count = 1) const;
  // Does the same for this rank. Throws std::invalid_argument on a rank outside the mesh too.
  std::vector<int64_t> local(int64_t step, const DeviceMesh& mesh, const Placements& placements, int64_t index = 0,
                             int64_t count = 1) const;

  friend bool operator==(const GlobalBatches&, const GlobalBatches&) = default;

 private:
  std::vector<int64_t> at_positions(int64_t begin, int64_t end) const;

  int64_t samples_;
  int64_t batch_size_;
  uint64_t seed_;
};

// Returns this rank's rows of a tensor of `rows` rows that is laid out as `placements` over `mesh`: where a data set is
// read in order, as for evaluation, row i of a batch that begins at sample b is sample b + i. They are adjacent, and
// may be none. Throws std::invalid_argument on a rank outside the mesh, a negative number of rows, and on placements
// that do not fit the mesh, cut another dimension than 0, are pending reductions, or give any rank rows that are not
// adjacent.
Interval rows_here(int64_t rows, const DeviceMesh& mesh, const Placements& placements);

}  // namespace tessera
