// Tests the collectives of ranks that are threads, each on a stream of its own whose work is done late: what a rank has
// been given to compute is waited for, and so is what it gets.

#include <array>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/dtensor/measured_costs.h"
#include "tessera/mesh/collectives/checked.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/tests/accelerator/numbers_of_ranks.h"
#include "tessera/tests/accelerator/streams.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/tp_line.h"

using namespace tessera;
using namespace tessera::testing;

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
