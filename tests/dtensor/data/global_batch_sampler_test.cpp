#include <cstddef>
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <vector>

#include <doctest/doctest.h>
#include <torch/torch.h>

#include "tessera/dtensor/data/global_batch_sampler.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/tests/styles/fake_mesh.h"

namespace {

using tessera::GlobalBatches;
using tessera::GlobalBatchSampler;
using tessera::GlobalBatchSamplerOptions;
using tessera::Replicate;
using tessera::Shard;
using tessera::testing::fake_mesh;

const GlobalBatches kBatches(50, 10, 3);

struct Numbers : torch::data::datasets::Dataset<Numbers> {
  torch::data::Example<> get(std::size_t index) override {
    const at::Tensor number = torch::tensor(static_cast<int64_t>(index));
    return {number, number};
  }
  std::optional<std::size_t> size() const override { return 50; }
};

GlobalBatchSampler sampler_of(int64_t rank, int64_t dp, const GlobalBatchSamplerOptions& options,
                              const GlobalBatches& batches = kBatches) {
  return {batches, fake_mesh(rank, {dp, 2}, {"dp", "tp"}), {Shard(0), Replicate()}, options};
}

std::vector<int64_t> rest_of(GlobalBatchSampler& sampler) {
  std::vector<int64_t> out;
  while (const auto samples = sampler.next(10)) out.insert(out.end(), samples->begin(), samples->end());
  return out;
}

}  // namespace

TEST_CASE("GlobalBatchSampler: a data loader gives the rank's piece of each step, uneven ones too") {
  for (const int64_t rank : {0, 1, 2, 5}) {  // ranks 0 and 1 differ in tp alone
    CAPTURE(rank);
    const GlobalBatchSampler sampler = sampler_of(rank, 3, {.first_step = 2, .end_step = 7});
    const auto loader = torch::data::make_data_loader(Numbers().map(torch::data::transforms::Stack<>()), sampler, 10);
    int64_t step = 2;
    for (const torch::data::Example<>& got : *loader) {
      const std::vector<int64_t> whole = kBatches.of_step(step);
      const int64_t begin = rank / 2 * 4, end = std::min<int64_t>(begin + 4, 10);
      const std::vector<int64_t> want(whole.begin() + begin, whole.begin() + end);
      CHECK(torch::equal(got.data, torch::tensor(want)));
      ++step;
    }
    CHECK(step == 7);
  }
}

TEST_CASE("GlobalBatchSampler: micro-batches come one after the other, and a reset begins again") {
  GlobalBatchSampler sampler = sampler_of(0, 1, {.end_step = 2, .micro_batches = 3});
  for (int round = 0; round < 2; ++round) {
    for (int64_t step = 0; step < 2; ++step) {
      for (int64_t index = 0; index < 3; ++index) {
        CHECK(sampler.step() == step);
        const auto got = sampler.next(10);
        REQUIRE(got.has_value());
        CHECK(std::vector<int64_t>(got->begin(), got->end()) == kBatches.micro_batch(step, index, 3));
      }
    }
    CHECK(!sampler.next(10).has_value());
    sampler.reset(50);
  }
}

TEST_CASE("GlobalBatchSampler: a position that was saved is loaded on another mesh, and a reset goes back to it") {
  GlobalBatchSampler first = sampler_of(0, 2, {.end_step = 6});
  for (int i = 0; i < 4; ++i) first.next(10);
  std::stringstream file;
  torch::serialize::OutputArchive out;
  first.save(out);
  out.save_to(file);
  torch::serialize::InputArchive in;
  in.load_from(file);
  GlobalBatchSampler second = sampler_of(0, 1, {.end_step = 6}),
                     begun = sampler_of(0, 1, {.first_step = 4, .end_step = 6});
  second.load(in);
  CHECK(second.step() == 4);
  const std::vector<int64_t> want = rest_of(begun);
  REQUIRE(want.size() == 20);
  CHECK(rest_of(second) == want);
  second.reset();
  CHECK(rest_of(second) == want);
  GlobalBatchSampler other = sampler_of(0, 1, {.end_step = 6}, {50, 10, 4});
  CHECK_THROWS_WITH_AS(other.load(in), doctest::Contains("the saved position is one of"), std::invalid_argument);
}

TEST_CASE("GlobalBatchSampler: what is refused") {
  CHECK_THROWS_WITH_AS(sampler_of(0, 1, {.first_step = 3, .end_step = 2}), doctest::Contains("steps 3 to 2"),
                       std::invalid_argument);
  CHECK_THROWS_AS(sampler_of(0, 1, {.end_step = 2, .micro_batches = 0}), std::invalid_argument);
  CHECK_THROWS_WITH_AS(sampler_of(0, 1, {.end_step = int64_t{1} << 62, .micro_batches = 2}),
                       doctest::Contains("fewer than 2^63 micro-batches in all"), std::invalid_argument);
  CHECK_THROWS_AS(GlobalBatchSampler(kBatches, fake_mesh(0, {2}, {"dp"}), {Shard(1)}, {.end_step = 2}),
                  std::invalid_argument);
  GlobalBatchSampler sampler = sampler_of(0, 1, {.end_step = 2});
  CHECK_THROWS_WITH_AS(sampler.next(5), doctest::Contains("asks for 5 samples, but the global batch has 10"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(sampler.reset(51), doctest::Contains("reset to 51 samples"), std::invalid_argument);
}
