#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <stdexcept>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/dtensor/data/global_batches.h"
#include "tessera/dtensor/data/permutation.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/mesh.h"
#include "tessera/placement/placement.h"
#include "tessera/tests/styles/fake_mesh.h"

namespace {

using tessera::DeviceMesh;
using tessera::GlobalBatches;
using tessera::Mesh;
using tessera::Permutation;
using tessera::Placements;
using tessera::Replicate;
using tessera::Shard;
using tessera::testing::fake_mesh;
using Samples = std::vector<int64_t>;

Samples sorted(Samples samples) {
  std::sort(samples.begin(), samples.end());
  return samples;
}

Samples counted(int64_t count) {
  Samples out(static_cast<std::size_t>(count));
  std::iota(out.begin(), out.end(), 0);
  return out;
}

Samples all_of(const Permutation& permutation) {
  Samples out;
  for (int64_t i = 0; i < permutation.size(); ++i) out.push_back(permutation.at(i));
  return out;
}

void append(Samples& to, const Samples& more) { to.insert(to.end(), more.begin(), more.end()); }

// Joins what the ranks of `mesh` get that have different samples: those at coordinate 0 of mesh dimensions that cut
// nothing.
Samples of_all_ranks(const GlobalBatches& batches, int64_t step, const Mesh& mesh, const Placements& placements,
                     int64_t index = 0, int64_t count = 1) {
  Samples out;
  for (const int64_t rank : mesh.ranks()) {
    const std::vector<int64_t> coordinate = *mesh.coordinate_of(rank);
    bool is_copy = false;
    for (std::size_t i = 0; i < placements.size(); ++i) {
      is_copy = is_copy || (placements[i].is_replicate() && coordinate[i] != 0);
    }
    if (!is_copy) append(out, batches.local(step, mesh, placements, coordinate, index, count));
  }
  return out;
}

}  // namespace

TEST_CASE("Permutation: of every size it has every number once") {
  for (int64_t size = 1; size <= 300; ++size) {
    CAPTURE(size);
    CHECK(sorted(all_of(Permutation(size, 7, 3))) == counted(size));
  }
  CHECK(sorted(all_of(Permutation(100'003, 1, 0))) == counted(100'003));
}

TEST_CASE("Permutation: another seed and another number give another order, and the same give the same") {
  const Samples first = all_of(Permutation(1000, 1, 0));
  CHECK(all_of(Permutation(1000, 1, 0)) == first);
  for (const Samples& other :
       {all_of(Permutation(1000, 2, 0)), all_of(Permutation(1000, 1, 1)),
        all_of(Permutation(1000, uint64_t{1} << 32 | 1, 0)), all_of(Permutation(1000, 1, uint64_t{1} << 32))}) {
    int same = 0;
    for (std::size_t i = 0; i < first.size(); ++i) same += other[i] == first[i] ? 1 : 0;
    CHECK(same < 10);  // one is expected
  }
}

TEST_CASE("Permutation: over many seeds, each of 6 orders of 3 elements comes as often as the others, to a tenth") {
  std::map<Samples, int> counts;
  for (uint64_t seed = 0; seed < 6000; ++seed) ++counts[all_of(Permutation(3, seed, 0))];
  CHECK(counts.size() == 6);
  for (const auto& [order, count] : counts) {
    CHECK(count > 900);
    CHECK(count < 1100);
  }
}

TEST_CASE("Permutation: a number of elements near the limit, and what is refused") {
  const Permutation largest(int64_t{1} << 62, 1, 0);
  CHECK(largest.at(0) != largest.at(1));
  CHECK(largest.at((int64_t{1} << 62) - 1) >= 0);
  CHECK_THROWS_WITH_AS(Permutation(0, 1, 0), "Permutation: 0 elements cannot be permuted; give 1 to 2^62",
                       std::invalid_argument);
  CHECK_THROWS_AS(Permutation((int64_t{1} << 62) + 1, 1, 0), std::invalid_argument);
  CHECK_THROWS_WITH_AS(Permutation(5, 1, 0).at(5), "Permutation: 5 is outside [0, 5)", std::out_of_range);
  CHECK_THROWS_AS(Permutation(5, 1, 0).at(-1), std::out_of_range);
}

TEST_CASE("GlobalBatches: each epoch has every sample once, also where batches lie across its end") {
  for (const int64_t batch_size : {1, 3, 7, 10, 25}) {
    CAPTURE(batch_size);
    const GlobalBatches batches(10, batch_size, 5);
    Samples stream;
    for (int64_t step = 0; step * batch_size < 50; ++step) append(stream, batches.of_step(step));
    Samples orders;
    for (int64_t epoch = 0; epoch < 5; ++epoch) {
      const Samples order(stream.begin() + epoch * 10, stream.begin() + epoch * 10 + 10);
      CHECK(sorted(order) == counted(10));
      CHECK(order != Samples(stream.begin() + (epoch + 1) % 5 * 10, stream.begin() + (epoch + 1) % 5 * 10 + 10));
    }
  }
}

TEST_CASE("GlobalBatches: a step's samples follow from the seed and the step, and are these") {
  // Written down once: a change of the order makes every saved run go on with other samples.
  CHECK(GlobalBatches(1000, 4, 1).of_step(0) == Samples{740, 611, 43, 664});
  CHECK(GlobalBatches(1000, 4, 1).of_step(249) == Samples{961, 889, 59, 934});
  CHECK(GlobalBatches(1000, 4, 2).of_step(0) == Samples{786, 624, 22, 671});
  CHECK(GlobalBatches(1000, 4, 1) == GlobalBatches(1000, 4, 1));
  CHECK(GlobalBatches(1000, 4, 1) != GlobalBatches(1000, 4, 2));
}

TEST_CASE("GlobalBatches: pieces of ranks, in order, are the batch, on any mesh and with any number of micro-batches") {
  struct Row {
    const char* why;
    Mesh mesh;
    Placements placements;
  };
  const std::vector<Row> rows = {
      {"one rank", Mesh({1}, {"dp"}), {Shard(0)}},
      {"data ranks", Mesh({3}, {"dp"}), {Shard(0)}},
      {"data and tensor ranks", Mesh({2, 2}, {"dp", "tp"}), {Shard(0), Replicate()}},
      {"tensor ranks first", Mesh({2, 3}, {"tp", "dp"}), {Replicate(), Shard(0)}},
      {"tensor ranks alone", Mesh({4}, {"tp"}), {Replicate()}},
      {"two data dimensions", Mesh({2, 3, 2}, {"a", "b", "tp"}), {Shard(0), Shard(0), Replicate()}},
      {"ragged pieces", Mesh({3}, {"dp"}), {tessera::RaggedShard(0, {5, 0, 1})}},
  };
  const GlobalBatches batches(23, 12, 9);
  for (const Row& row : rows) {
    CAPTURE(row.why);
    for (const int64_t count : {2, 1, 12, 5, 20}) {
      if (row.placements[0] == tessera::RaggedShard(0, {5, 0, 1}) && count != 2) continue;
      CAPTURE(count);
      for (const int64_t step : {0, 1, 6}) {
        Samples all, parts;
        for (int64_t index = 0; index < count; ++index) {
          const Samples of_ranks = of_all_ranks(batches, step, row.mesh, row.placements, index, count);
          CHECK(of_ranks == batches.micro_batch(step, index, count));
          append(all, of_ranks);
        }
        CHECK(all == batches.of_step(step));
      }
    }
  }
}

TEST_CASE("GlobalBatches: 10 samples over 3 ranks are 4, 4 and 2; 4 over 3 are 2, 2 and none") {
  const Mesh mesh({3}, {"dp"});
  const auto sizes = [&](int64_t batch_size) {
    Samples out;
    for (int64_t rank = 0; rank < 3; ++rank) {
      const std::array<int64_t, 1> coordinate = {rank};
      const GlobalBatches batches(100, batch_size, 1);
      out.push_back(static_cast<int64_t>(batches.local(0, mesh, {Shard(0)}, coordinate).size()));
    }
    return out;
  };
  CHECK(sizes(10) == Samples{4, 4, 2});
  CHECK(sizes(4) == Samples{2, 2, 0});
}

TEST_CASE("GlobalBatches: on this rank's mesh the samples are those of its coordinate, and rows_here are their rows") {
  const GlobalBatches batches(20, 10, 3);
  const Placements placements = {Shard(0), Replicate()};
  for (int64_t rank = 0; rank < 6; ++rank) {
    const DeviceMesh mesh = fake_mesh(rank, {3, 2}, {"dp", "tp"});
    CHECK(batches.local(1, mesh, placements, 1, 2) ==
          batches.local(1, mesh.mesh(), placements, *mesh.coordinate(), 1, 2));
    const tessera::Interval rows = tessera::rows_here(10, mesh, placements);
    const Samples step = batches.of_step(1);
    CHECK(batches.local(1, mesh, placements) == Samples(step.begin() + rows.begin, step.begin() + rows.end));
    CHECK(tessera::rows_here(10, mesh, {Replicate(), Replicate()}).size() == 10);
    CHECK(tessera::rows_here(0, mesh, placements).size() == 0);
    CHECK(tessera::rows_here(1, mesh, placements).size() == (rank < 2 ? 1 : 0));
    const auto refused = [&](int64_t rows_of_all, const Placements& given, const char* text) {
      CHECK_THROWS_WITH_AS(tessera::rows_here(rows_of_all, mesh, given), doctest::Contains(text),
                           std::invalid_argument);
    };
    refused(-1, placements, "rows_here: -1 rows");
    refused(4, {tessera::Partial(), Replicate()}, "rows_here: samples are cut or whole");
    refused(12, {tessera::BlockCyclic(0, 2), Replicate()}, "rank 0 has 2 separate parts of 12 rows");
    refused(10, {tessera::BlockCyclic(0, 2), Replicate()}, "rank 0 has 2 separate parts of 10 rows");
  }
  const tessera::DeviceMesh other(fake_mesh(1, {2}).world_ptr(), at::kCPU, Mesh({1}, {"dp"}, {0}));
  CHECK_THROWS_WITH_AS(tessera::rows_here(4, other, {Shard(0)}), doctest::Contains("rank 1 is not in the mesh"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(batches.local(0, other, {Shard(0)}), doctest::Contains("rank 1 is not in the mesh"),
                       std::invalid_argument);
}

TEST_CASE("GlobalBatches: a run that goes on, on meshes of other sizes, repeats and misses no sample") {
  const GlobalBatches batches(50, 10, 3);
  const std::vector<Mesh> meshes = {Mesh({4}, {"dp"}), Mesh({3}, {"dp"}), Mesh({1}, {"dp"}), Mesh({7}, {"dp"})};
  Samples stream;
  for (int64_t step = 0; step < 20; ++step) {
    append(stream, of_all_ranks(batches, step, meshes[static_cast<std::size_t>(step / 2) % 4], {Shard(0)}));
  }
  std::map<int64_t, int> counts;
  for (const int64_t sample : stream) ++counts[sample];
  CHECK(counts.size() == 50);
  for (const auto& [sample, count] : counts) CHECK(count == 4);
}

TEST_CASE("GlobalBatches: the last step, and numbers near the limits of 63 bits") {
  constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
  const GlobalBatches batches(10, 4, 1);
  const int64_t last = (kLargest - 4) / 4;
  CHECK(batches.of_step(last).size() == 4);
  CHECK_THROWS_WITH_AS(batches.of_step(last + 1), doctest::Contains("there is no step 2305843009213693951 in batches"),
                       std::invalid_argument);
  const Mesh mesh({2}, {"dp"});
  const std::array<int64_t, 1> first = {0};
  CHECK_THROWS_WITH_AS(batches.local(kLargest, mesh, {Shard(0)}, first), doctest::Contains("GlobalBatches: "),
                       std::invalid_argument);
  CHECK(batches.micro_batch(0, 3, kLargest) == Samples{batches.of_step(0)[3]});
  CHECK(batches.micro_batch(0, kLargest - 1, kLargest).empty());
  const GlobalBatches whole(10, kLargest, 1);  // one batch has all positions
  CHECK(whole.micro_batch(0, kLargest - 1, kLargest) == GlobalBatches(10, 1, 1).of_step(kLargest - 1));
  CHECK_THROWS_AS(whole.micro_batch(1, 0, kLargest), std::invalid_argument);
}

TEST_CASE("GlobalBatches: what is refused") {
  CHECK_THROWS_WITH_AS(GlobalBatches(0, 4, 1),
                       "GlobalBatches: 0 samples in batches of 4; give at least 1 of each, and at most 2^62 samples",
                       std::invalid_argument);
  CHECK_THROWS_AS(GlobalBatches(4, 0, 1), std::invalid_argument);
  CHECK_THROWS_WITH_AS(GlobalBatches((int64_t{1} << 62) + 1, 4, 1), doctest::Contains("at most 2^62 samples"),
                       std::invalid_argument);
  const GlobalBatches batches(10, 4, 1);
  const Mesh mesh({2}, {"dp"});
  const std::array<int64_t, 1> first = {0};
  CHECK_THROWS_WITH_AS(batches.of_step(-1), doctest::Contains("there is no step -1"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(batches.micro_batch(0, 2, 2), doctest::Contains("no micro-batch 2 of 2"), std::invalid_argument);
  CHECK_THROWS_AS(batches.micro_batch(0, -1, 2), std::invalid_argument);
  CHECK_THROWS_AS(batches.micro_batch(0, 0, 0), std::invalid_argument);
  CHECK_THROWS_AS(batches.local(0, mesh, {Shard(1)}, first), std::invalid_argument);
  CHECK_THROWS_AS(batches.local(0, mesh, {Shard(0), Replicate()}, first), std::invalid_argument);
  CHECK_THROWS_WITH_AS(batches.local(0, mesh, {tessera::Partial()}, first),
                       doctest::Contains("samples are cut or whole, but the placements are"), std::invalid_argument);
  CHECK_THROWS_AS(batches.local(0, mesh, {tessera::RaggedShard(0, {1, 2})}, first), std::invalid_argument);
}
