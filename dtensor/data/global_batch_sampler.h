#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <torch/data/samplers/base.h>

#include "tessera/dtensor/data/global_batches.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

namespace tessera {

struct GlobalBatchSamplerOptions {
  int64_t first_step = 0;     // where the run begins, or goes on
  int64_t end_step = 0;       // the step after the last one
  int64_t micro_batches = 1;  // each next() gives one micro-batch's piece
};

// Gives LibTorch's data loaders this rank's samples of each step of `batches`, on a mesh:
//   const auto samples = static_cast<int64_t>(dataset.size().value());
//   GlobalBatchSampler sampler({samples, 32, seed}, mesh, {Shard(0), Replicate()}, {.end_step = 1000});
//   auto loader = torch::data::make_data_loader(dataset.map(Stack<>()), sampler, /*batch_size=*/32);
//
// The loader's batch size is that of the global batch: how many samples a rank gets follows from the mesh. A loader
// copies its sampler. So a program that goes on counts its steps, and makes a new sampler whose first_step is their
// number. A loader with workers asks ahead: the position of the sampler is then ahead of the batches that were used.
// Nothing here communicates.
//
// Leave drop_last out of the loader's options. LibTorch compares the rank's samples, of which there are fewer, with the
// batch size: with drop_last(true) the loader ends before its first batch, without an error, on every rank that does
// not hold all rows. There is nothing to drop, since batches go on from one epoch to the next, and each of them is
// full. Give each rank at least one sample of each batch: of a rank with none, LibTorch says that `indices->size() > 0`
// failed.
class GlobalBatchSampler : public torch::data::samplers::Sampler<std::vector<std::size_t>> {
 public:
  // Throws std::invalid_argument on steps or micro-batches that cannot be, on a rank outside the mesh, and as
  // GlobalBatches::local does.
  GlobalBatchSampler(const GlobalBatches& batches, const DeviceMesh& mesh, const Placements& placements,
                     const GlobalBatchSamplerOptions& options);

  // Returns the step of the batch that next() gives.
  int64_t step() const { return given_ / options_.micro_batches; }

  // Goes back to first_step, or to the position that was loaded. Throws std::invalid_argument on a size other than
  // that of the dataset.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  // Returns this rank's samples of the next micro-batch, of which there may be none where the batch is smaller than
  // the number of ranks; std::nullopt behind the last step. Throws std::invalid_argument unless `batch_size` is
  // that of the global batch.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;

  // Save and load the position, with what it is a position in. It may be loaded on another mesh. load throws
  // std::invalid_argument when the archive is of another number of samples, batch size, seed or number of
  // micro-batches.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  std::vector<int64_t> identity() const;

  GlobalBatches batches_;
  DeviceMesh mesh_;
  Placements placements_;
  GlobalBatchSamplerOptions options_;
  int64_t first_;  // of micro-batches, since step 0
  int64_t given_;
};

}  // namespace tessera
