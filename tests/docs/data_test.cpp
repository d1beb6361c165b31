// Holds the code of docs/data.md.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

#include <doctest/doctest.h>
#include <torch/torch.h>

#include "tessera/dtensor/data/global_batch_sampler.h"
#include "tessera/dtensor/data/global_batches.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/tests/harness/ranks.h"

namespace {

constexpr int64_t kLength = 3;

// Row i holds i, i + 0.25 and i + 0.5.
at::Tensor row(int64_t sample) { return torch::arange(kLength, torch::kDouble) / 4 + static_cast<double>(sample); }

struct Rows : torch::data::datasets::Dataset<Rows> {
  torch::data::Example<> get(std::size_t index) override {
    const at::Tensor one = row(static_cast<int64_t>(index));
    return {one, one};
  }
  std::optional<std::size_t> size() const override { return 96; }
};

at::Tensor read(const std::vector<int64_t>& samples) {
  at::Tensor rows = torch::empty({static_cast<int64_t>(samples.size()), kLength}, torch::kDouble);
  for (std::size_t i = 0; i < samples.size(); ++i) rows[static_cast<int64_t>(i)] = row(samples[i]);
  return rows;
}

tessera::DeviceMesh mesh_of_this_world() {
  const int64_t size = tessera::testing::world_size(), dp = size % 2 == 0 ? size / 2 : size;
  return tessera::init_device_mesh("cpu", {dp, size / dp}, {"dp", "tp"}, tessera::testing::world());
}

// Checks that each step's tensor has the samples of the step, in their order.
struct Steps {
  int64_t seen = 0;

  void check(const tessera::GlobalBatches& batches, int64_t step, const at::Tensor& rows) {
    CHECK(torch::equal(tessera::full_tensor(rows), read(batches.of_step(step))));
    ++seen;
  }
};

}  // namespace

TESSERA_RANKS_TEST_CASE("docs/data.md: each rank reads its samples of a step, and together they are the step's",
                        {1, 2, 3, 4}) {
  const tessera::DeviceMesh mesh = mesh_of_this_world();
  Steps steps;
  const int64_t first_step = 7, end_step = 12;
  const auto train = [&](int64_t step, const at::Tensor& rows) {
    steps.check(tessera::GlobalBatches(96, 10, 1), step, rows);
  };
  const tessera::GlobalBatches batches(/*samples=*/96, /*batch_size=*/10, /*seed=*/1);
  const tessera::Placements placements = {tessera::Shard(0), tessera::Replicate()};  // over {dp, tp}
  for (int64_t step = first_step; step < end_step; ++step) {
    const std::vector<int64_t> mine = batches.local(step, mesh, placements);
    const at::Tensor rows = tessera::from_local(read(mine), mesh, placements, {.shape = {{10, kLength}}});
    train(step, rows);
  }
  CHECK(steps.seen == 5);
  {
    const tessera::GlobalBatchSampler sampler(batches, mesh, placements,
                                              {.first_step = first_step, .end_step = end_step});
    const auto loader =
        torch::data::make_data_loader(Rows().map(torch::data::transforms::Stack<>()), sampler, /*batch_size=*/10);
    int64_t step = first_step;
    for (const torch::data::Example<>& batch : *loader) {
      train(step++, tessera::from_local(batch.data, mesh, placements, {.shape = {{10, kLength}}}));
    }
  }
  CHECK(steps.seen == 10);
}

TESSERA_RANKS_TEST_CASE("docs/data.md: the gradients of micro-batches add up to that of the batch", {1, 2, 3, 4}) {
  const tessera::DeviceMesh mesh = mesh_of_this_world();
  const tessera::Placements placements = {tessera::Shard(0), tessera::Replicate()};
  const tessera::GlobalBatches batches(96, 10, 1);
  const int64_t step = 3;
  at::Tensor weight = torch::ones({kLength}, torch::kDouble).requires_grad_();
  tessera::distribute_in_place(weight, mesh, {tessera::Replicate(), tessera::Replicate()});
  const auto loss_of = [&](const at::Tensor& rows) { return (rows * weight).square().mean(); };
  constexpr int64_t kParts = 2;
  for (int64_t part = 0; part < kParts; ++part) {
    const std::vector<int64_t> mine = batches.local(step, mesh, placements, part, kParts);
    const at::Tensor rows = tessera::from_local(read(mine), mesh, placements, {.shape = {{10 / kParts, kLength}}});
    (loss_of(rows) / kParts).backward();
  }
  const at::Tensor want = (read(batches.of_step(step)).square() * 2).mean(0) / kLength;
  CHECK(torch::allclose(tessera::full_tensor(weight.grad()), want, 1e-12, 1e-12));
}

TESSERA_RANKS_TEST_CASE("docs/data.md: a validation set is read once, in order, over any number of ranks",
                        {1, 2, 3, 4}) {
  const tessera::DeviceMesh mesh = mesh_of_this_world();
  const tessera::Placements placements = {tessera::Shard(0), tessera::Replicate()};
  constexpr int64_t kSamples = 21, kRows = 10;
  const torch::NoGradGuard no_gradient;
  std::vector<at::Tensor> seen;
  const auto losses_of = [&](const at::Tensor& rows) {
    seen.push_back(tessera::full_tensor(rows));
    return rows.square().sum(1);
  };
  double total = 0;
  for (int64_t begin = 0; begin < kSamples; begin += kRows) {
    const int64_t count = std::min(kRows, kSamples - begin);  // the last batch may be smaller
    const tessera::Interval mine = tessera::rows_here(count, mesh, placements);
    std::vector<int64_t> samples(static_cast<std::size_t>(mine.size()));
    std::iota(samples.begin(), samples.end(), begin + mine.begin);
    const at::Tensor rows = tessera::from_local(read(samples), mesh, placements, {.shape = {{count, kLength}}});
    total += tessera::full_tensor(losses_of(rows).sum()).item<double>();
  }
  const double mean = total / kSamples;
  std::vector<int64_t> all(kSamples);
  std::iota(all.begin(), all.end(), 0);
  CHECK(torch::equal(torch::cat(seen), read(all)));
  CHECK(mean == doctest::Approx(read(all).square().sum().item<double>() / 21));
}
