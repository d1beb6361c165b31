// Tests that every collective waits for what each rank has queued on its device. Ranks that are threads share a device;
// ranks that are processes pass the values through the host's memory, over Gloo.

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/mesh/collectives/collectives.h"
#include "tessera/tests/accelerator/numbers_of_ranks.h"
#include "tessera/tests/accelerator/streams.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/tp_line.h"

using namespace tessera;
using namespace tessera::testing;

TESSERA_RANKS_TEST_CASE("every collective waits for what each rank has queued, and each rank for the result",
                        {2, 3, 4}) {
  const DeviceMesh mesh = tp_line();
  const OwnStream stream;
  const int64_t n = world_size();
  for (int round = 0; round < kRounds; ++round) {
    // Each input is dropped at once.
    CHECK(same_values(all_reduce(mine(3, 4), mesh, 0, ReduceOp::kSum), sum_of_ranks(3, 4)));
    CHECK(same_values(all_reduce(mine(3, 4), mesh, 0, ReduceOp::kMax), of_rank(n - 1, 3, 4)));
    CHECK(same_values(all_gather(mine(2, 3), mesh, 0), rows_of_ranks(2, 3)));
    CHECK(same_values(all_gather(mine(1, rank() + 1).flatten(), uneven(), mesh, 0), uneven_pieces()));
    CHECK(same_values(reduce_scatter(mine(n, 5), mesh, 0, ReduceOp::kSum), sum_of_ranks(n, 5)[rank()]));
    CHECK(same_values(reduce_scatter(mine(1, sum_of_uneven()).flatten(), uneven(), mesh, 0, ReduceOp::kSum),
                      uneven_sum()));
    CHECK(same_values(all_to_all(mine(1, n * (rank() + 1)).flatten(), to_all(rank() + 1), uneven(), mesh, 0),
                      exchanged()));
    CHECK(same_values(broadcast(mine(2, 2), mesh, 0, round % n), of_rank(round % n, 2, 2)));
    CHECK(same_values(scatter(mine(n, 3), mine(1, 3)[0], mesh, 0, round % n), of_rank(round % n, n, 3)[rank()]));
    barrier(mesh, 0);
  }
}

TESSERA_RANKS_TEST_CASE("collectives that are started together give what they give one by one", {1, 2, 4}) {
  const DeviceMesh mesh = tp_line();
  const OwnStream stream;
  for (int round = 0; round < kRounds; ++round) {
    PendingCollective summed = start_all_reduce(mine(3, 4), mesh, 0, ReduceOp::kSum);
    PendingCollective owned = start_all_reduce(mine(2, 2), mesh, 0, ReduceOp::kSum, /*owned=*/true);
    PendingCollective gathered = start_all_gather(mine(1, rank() + 1).flatten(), uneven(), mesh, 0);
    PendingCollective piece =
        start_reduce_scatter(mine(1, sum_of_uneven()).flatten(), uneven(), mesh, 0, ReduceOp::kSum);
    PendingCollective swapped =
        start_all_to_all(mine(1, world_size() * (rank() + 1)).flatten(), to_all(rank() + 1), uneven(), mesh, 0);
    const at::Tensor results[] = {summed.wait(), owned.wait(), gathered.wait(), piece.wait(), swapped.wait()};
    CHECK(same_values(results[0], sum_of_ranks(3, 4)));
    CHECK(same_values(results[1], sum_of_ranks(2, 2)));
    CHECK(same_values(results[2], uneven_pieces()));
    CHECK(same_values(results[3], uneven_sum()));
    CHECK(same_values(results[4], exchanged()));
  }
}

TESSERA_RANKS_TEST_CASE("a collective may be waited for on another stream, whose work keeps the result", {1, 2, 4}) {
  const DeviceMesh mesh = tp_line();
  const OwnStream stream;
  for (int round = 0; round < kRounds; ++round) {
    PendingCollective summed = start_all_reduce(mine(3, 4), mesh, 0, ReduceOp::kSum);
    PendingCollective gathered = start_all_gather(mine(1, rank() + 1).flatten(), uneven(), mesh, 0);
    const OwnStream other(1);
    // Each result is dropped at once.
    const at::Tensor sum = summed.wait() * 2;
    const at::Tensor rows = gathered.wait() * 2;
    CHECK(same_values(sum, sum_of_ranks(3, 4) * 2));
    CHECK(same_values(rows, uneven_pieces() * 2));
  }
}

TESSERA_RANKS_TEST_CASE("an input may be overwritten as soon as its collective has been waited for", {2, 4}) {
  const DeviceMesh mesh = tp_line();
  const OwnStream stream;
  for (int round = 0; round < kRounds; ++round) {
    at::Tensor input = mine(2, 3);
    const at::Tensor rows = all_gather(input, mesh, 0);
    input.fill_(-1);
    CHECK(same_values(rows, rows_of_ranks(2, 3)));
  }
}
