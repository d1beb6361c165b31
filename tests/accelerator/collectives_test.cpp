// Tests the collectives of ranks that are threads, each on a stream of its own whose work is done late: what a rank has
// been given to compute is waited for, and so is what it gets.

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/dtensor/measured_costs.h"
#include "tessera/mesh/collectives/checked.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/tests/accelerator/streams.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/tp_line.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr double kApart = 1000;  // between the numbers of two ranks

at::Tensor mine(int64_t rows, int64_t columns) {
  return late_numbers(kApart * static_cast<double>(rank()), rows, columns);
}
at::Tensor of_rank(int64_t rank, int64_t rows, int64_t columns) {
  return numbers_at_once(kApart * static_cast<double>(rank), rows, columns);
}

at::Tensor sum_of_ranks(int64_t rows, int64_t columns) {
  at::Tensor out = at::zeros({rows, columns}, at::kDouble);
  for (int64_t r = 0; r < world_size(); ++r) out += of_rank(r, rows, columns);
  return out;
}

at::Tensor rows_of_ranks(int64_t rows, int64_t columns) {
  std::vector<at::Tensor> all;
  for (int64_t r = 0; r < world_size(); ++r) all.push_back(of_rank(r, rows, columns));
  return at::stack(all);
}

// Rank r's piece has r + 1 elements.
std::vector<int64_t> uneven() {
  std::vector<int64_t> counts;
  for (int64_t r = 0; r < world_size(); ++r) counts.push_back(r + 1);
  return counts;
}
int64_t sum_of_uneven() { return world_size() * (world_size() + 1) / 2; }

at::Tensor uneven_pieces() {
  std::vector<at::Tensor> all;
  for (int64_t r = 0; r < world_size(); ++r) all.push_back(of_rank(r, 1, r + 1).flatten());
  return at::cat(all);
}

// This rank's piece of the sum of what all ranks have for a reduce_scatter in uneven pieces.
at::Tensor uneven_sum() {
  return sum_of_ranks(1, sum_of_uneven()).flatten().narrow(0, rank() * (rank() + 1) / 2, rank() + 1);
}

std::vector<int64_t> to_all(int64_t count) {
  return std::vector<int64_t>(static_cast<std::size_t>(world_size()), count);
}

// Rank r sends rank i r + 1 elements.
at::Tensor exchanged() {
  std::vector<at::Tensor> all;
  for (int64_t r = 0; r < world_size(); ++r) {
    all.push_back(of_rank(r, 1, (r + 1) * world_size()).flatten().narrow(0, rank() * (r + 1), r + 1));
  }
  return at::cat(all);
}

}  // namespace

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

TESSERA_RANKS_TEST_CASE("collectives that are started together give what they give one by one", {2, 4}) {
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

TESSERA_RANKS_TEST_CASE("a collective may be waited for on another stream, whose work keeps the result", {2, 4}) {
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

TESSERA_RANKS_TEST_CASE("a collective that nobody waits for still has its inputs", {2, 4}) {
  const DeviceMesh mesh = tp_line();
  const OwnStream stream;
  for (int round = 0; round < kRounds; ++round) {
    // The last rank comes last, queues the copies and waits for the result. The others drop their tensors, and c10d's
    // work, at once.
    if (rank() == world_size() - 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    at::Tensor input = mine(2, 3).flatten();
    at::Tensor output = at::empty({6 * world_size()}, on(at::kDouble));
    const auto work = mesh.group(0)->_allgather_base(output, input);
    input.reset();
    if (rank() == world_size() - 1) {
      work->wait();
      CHECK(same_values(output, rows_of_ranks(2, 3).flatten()));
    }
  }
  barrier(mesh, 0);
}

TESSERA_RANKS_TEST_CASE("a message waits for its sender, and its receiver for the message", {2}) {
  const DeviceMesh mesh = tp_line();
  const OwnStream stream;
  for (int round = 0; round < 3 * kRounds; ++round) {
    // By turns the sender or the receiver comes last, and so queues the copy.
    if ((round + rank()) % 2 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::vector<at::Tensor> tensors = {rank() == 0 ? mine(2, 3) : late_numbers(-1, 2, 3)};
    if (rank() == 0) {
      mesh.group(0)->send(tensors, 1, 0)->wait();
      tensors[0].fill_(-1);
    } else {
      mesh.group(0)->recv(tensors, 0, 0)->wait();
      CHECK(same_values(tensors[0], of_rank(0, 2, 3)));
    }
  }
  barrier(mesh, 0);
}

TESSERA_RANKS_TEST_CASE("a message that nobody waits for still has its memory", {2}) {
  const DeviceMesh mesh = tp_line();
  const OwnStream stream;
  for (int round = 0; round < 3 * kRounds; ++round) {
    // The sender comes first and drops its tensor and c10d's work. The receiver queues the copy.
    std::vector<at::Tensor> tensors = {rank() == 0 ? mine(2, 3) : late_numbers(-1, 2, 3)};
    if (rank() == 0) {
      mesh.group(0)->send(tensors, 1, 0);
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      mesh.group(0)->recv(tensors, 0, 0)->wait();
      CHECK(same_values(tensors[0], of_rank(0, 2, 3)));
    }
  }
  barrier(mesh, 0);
}

TESSERA_RANKS_TEST_CASE("Checked compares collectives of ranks on streams of their own", {2, 3}) {
  const DeviceMesh mesh = tp_line();
  // Rank 0 comes last and carries the comparison out, on a stream that takes longer than the others'.
  const OwnStream stream(0, std::chrono::milliseconds(rank() == 0 ? 1 : 0));
  const Checked checked(mesh);
  for (int round = 0; round < kRounds; ++round) {
    if (rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const int64_t columns = 4 + round;  // what ranks compare is another each time, so that none may take the last
    CHECK(same_values(all_reduce(mine(3, columns), mesh, 0, ReduceOp::kSum), sum_of_ranks(3, columns)));
  }
}

TESSERA_RANKS_TEST_CASE("measured costs count the time that streams take", {2}) {
  const DeviceMesh mesh = tp_line();
  constexpr std::chrono::microseconds kLeast(3000);
  const OwnStream stream(0, kLeast);
  CHECK(measured_costs(mesh).links[0].microseconds > static_cast<double>(kLeast.count()) / 2);
}

TESSERA_RANKS_TEST_CASE("a collective that is dropped waits for the other ranks", {2}) {
  static std::array<std::atomic<bool>, kRounds> has_come;
  const DeviceMesh mesh = tp_line();
  const OwnStream stream;
  for (int round = 0; round < kRounds; ++round) {
    if (rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      has_come[static_cast<std::size_t>(round)] = true;
    }
    { const PendingCollective dropped = start_all_reduce(mine(3, 4), mesh, 0, ReduceOp::kSum); }
    CHECK(has_come[static_cast<std::size_t>(round)]);
    barrier(mesh, 0);
  }
}
