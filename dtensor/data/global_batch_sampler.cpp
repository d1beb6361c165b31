#include "tessera/dtensor/data/global_batch_sampler.h"

#include <limits>
#include <stdexcept>

#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/serialize/archive.h>

namespace tessera {
namespace {

GlobalBatchSamplerOptions checked(const GlobalBatchSamplerOptions& options) {
  const bool ordered = options.micro_batches >= 1 && options.first_step >= 0 && options.first_step <= options.end_step;
  if (ordered && options.end_step <= std::numeric_limits<int64_t>::max() / options.micro_batches) return options;
  throw std::invalid_argument(
      fmt::format("GlobalBatchSampler: steps {} to {} in {} micro-batches each; give 0 <= first_step <= end_step and "
                  "at least 1 micro-batch, and fewer than 2^63 micro-batches in all",
                  options.first_step, options.end_step, options.micro_batches));
}

}  // namespace

GlobalBatchSampler::GlobalBatchSampler(const GlobalBatches& batches, const DeviceMesh& mesh,
                                       const Placements& placements, const GlobalBatchSamplerOptions& options)
    : batches_(batches),
      mesh_(mesh),
      placements_(placements),
      options_(checked(options)),
      first_(options.first_step * options.micro_batches),
      given_(first_) {
  if (!mesh.is_member()) {
    throw std::invalid_argument(
        fmt::format("GlobalBatchSampler: rank {} is not in the mesh {}; make samplers on the ranks of the mesh",
                    mesh.world().rank(), mesh.to_string()));
  }
  batches_.local(0, mesh_, placements_, 0, options_.micro_batches);  // checks placements
}

void GlobalBatchSampler::reset(std::optional<std::size_t> new_size) {
  if (new_size.has_value() && static_cast<int64_t>(*new_size) != batches_.samples()) {
    throw std::invalid_argument(
        fmt::format("GlobalBatchSampler: reset to {} samples, but it was made for {}; make a new sampler", *new_size,
                    batches_.samples()));
  }
  given_ = first_;
}

std::optional<std::vector<std::size_t>> GlobalBatchSampler::next(std::size_t batch_size) {
  if (static_cast<int64_t>(batch_size) != batches_.batch_size()) {
    throw std::invalid_argument(fmt::format(
        "GlobalBatchSampler: the loader asks for {} samples, but the global batch has {}; give the loader this number",
        batch_size, batches_.batch_size()));
  }
  if (step() >= options_.end_step) return std::nullopt;
  const std::vector<int64_t> samples =
      batches_.local(step(), mesh_, placements_, given_ % options_.micro_batches, options_.micro_batches);
  ++given_;
  return std::vector<std::size_t>(samples.begin(), samples.end());
}

std::vector<int64_t> GlobalBatchSampler::identity() const {
  return {batches_.samples(), batches_.batch_size(), static_cast<int64_t>(batches_.seed()), options_.micro_batches};
}

void GlobalBatchSampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("position", at::tensor(given_, at::kLong), /*is_buffer=*/true);
  archive.write("batches", at::tensor(identity(), at::kLong), /*is_buffer=*/true);
}

void GlobalBatchSampler::load(torch::serialize::InputArchive& archive) {
  at::Tensor position, saved;
  archive.read("position", position, /*is_buffer=*/true);
  archive.read("batches", saved, /*is_buffer=*/true);
  const std::vector<int64_t> here = identity();
  const at::Tensor contiguous = saved.contiguous();
  const std::vector<int64_t> there(contiguous.const_data_ptr<int64_t>(),
                                   contiguous.const_data_ptr<int64_t>() + contiguous.numel());
  if (there != here) {
    throw std::invalid_argument(
        fmt::format("GlobalBatchSampler: the saved position is one of samples, batch size, seed and micro-batches {}, "
                    "but this sampler has {}; make the sampler as it was when the state was saved",
                    there, here));
  }
  first_ = given_ = position.item<int64_t>();
}

}  // namespace tessera
