// Tests what a group over NCCL is asked for, on a backend that has NCCL's name, records the calls and moves nothing.

#include <algorithm>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/collectives/exchange_rounds.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/world.h"

namespace {

using namespace tessera;
using Counts = std::vector<int64_t>;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct RecordedCall {
  std::string kind;
  bool on_own_stream;
  Counts send = {};     // bytes to each rank
  Counts receive = {};  // bytes from each rank
  c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM;

  int64_t operations() const {
    const auto some = [](int64_t count) { return count != 0; };
    return std::ranges::count_if(send, some) + std::ranges::count_if(receive, some);
  }
};

class DoneWork : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds) override { return true; }
};

// Returns no work where the caller waits at once, as ProcessGroupNCCL does.
class RecordingBackend : public c10d::Backend {
 public:
  RecordingBackend(int rank, int size) : Backend(rank, size) {}
  const std::string getBackendName() const override { return "nccl"; }

  WorkPtr allreduce(Tensors&, const c10d::AllreduceOptions& options) override {
    return note({.kind = "all_reduce", .on_own_stream = options.asyncOp, .op = options.reduceOp});
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor&, const c10d::AllgatherOptions& options) override {
    output.zero_();
    return note({.kind = "all_gather", .on_own_stream = options.asyncOp});
  }
  WorkPtr _reduce_scatter_base(at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions& options) override {
    return note({.kind = "reduce_scatter", .on_own_stream = options.asyncOp, .op = options.reduceOp});
  }
  WorkPtr broadcast(Tensors&, const c10d::BroadcastOptions& options) override {
    return note({.kind = "broadcast", .on_own_stream = options.asyncOp});
  }
  WorkPtr scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions& options) override {
    return note({.kind = "scatter", .on_own_stream = options.asyncOp});
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, Counts& receive, Counts& send,
                        const c10d::AllToAllOptions& options) override {
    const auto sum = [](const Counts& counts) { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); };
    if (sum(send) != input.numel() || sum(receive) != output.numel()) {
      throw std::invalid_argument("the counts do not add up to the sizes of the tensors");
    }
    // Each part of the output is filled with the number of the rank that it comes from.
    int64_t offset = 0;
    for (std::size_t from = 0; from < receive.size(); ++from) {
      output.narrow(0, offset, receive[from]).fill_(static_cast<int64_t>(from % 251));
      offset += receive[from];
    }
    return note({.kind = "all_to_all", .on_own_stream = options.asyncOp, .send = send, .receive = receive});
  }

  std::vector<RecordedCall> calls;

 private:
  WorkPtr note(RecordedCall call) {
    calls.push_back(std::move(call));
    return calls.back().on_own_stream ? WorkPtr(c10::make_intrusive<DoneWork>()) : WorkPtr();
  }
};

// A rank of a fake world of `size`, whose one group records.
struct Recorded {
  Recorded(int64_t rank, int64_t size)
      : group(c10::make_intrusive<RecordingBackend>(static_cast<int>(rank), static_cast<int>(size))),
        mesh(DeviceMesh::from_group(group, "cpu", "tp", World::fake(rank, size))) {}

  c10::intrusive_ptr<RecordingBackend> group;
  DeviceMesh mesh;
};

// Executes the rounds of all ranks as NCCL does: a rank's round ends when each of its sends and receives has met its
// counterpart in the round that the other rank has come to. Returns how many operations were matched, or -1 where the
// ranks wait for each other.
int64_t matched_operations(const std::vector<std::vector<ExchangeRound>>& rounds) {
  const auto n = static_cast<int64_t>(rounds.size());
  std::map<std::pair<int64_t, int64_t>, std::size_t> sent, received;  // the round of (from, to)
  int64_t matched = 0;
  for (int64_t rank = 0; rank < n; ++rank) {
    const auto& mine = rounds[static_cast<std::size_t>(rank)];
    for (std::size_t t = 0; t < mine.size(); ++t) {
      for (int64_t to = mine[t].send_begin; to < mine[t].send_end; ++to) sent[{rank, to}] = t;
      for (int64_t from = mine[t].receive_begin; from < mine[t].receive_end; ++from) received[{from, rank}] = t;
      matched += mine[t].operations();
    }
  }
  return sent == received ? matched : -1;
}

}  // namespace

TEST_CASE("the rounds of an exchange: one where it fits, else blocks of equal sizes") {
  CHECK((exchange_rounds(3, 1) == std::vector<ExchangeRound>{{0, 3, 0, 3}}));
  CHECK(exchange_rounds(128, 127).size() == 1);
  CHECK((exchange_rounds(129, 0) == std::vector<ExchangeRound>{{0, 65, 0, 65}, {65, 129, 65, 129}}));
  CHECK((exchange_rounds(5, 2, 4) == std::vector<ExchangeRound>{{2, 4, 2, 4}, {4, 5, 0, 2}, {0, 2, 4, 5}}));
  CHECK_THROWS_WITH_AS(exchange_rounds(4, 4), doctest::Contains("coordinate 4 of 4"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(exchange_rounds(4, 0, 1), doctest::Contains("at most 1 operations"), std::invalid_argument);
}

TEST_CASE("the rounds of an exchange: every pair meets once, in the same round of both, within the limit") {
  for (const int64_t most : {2, 3, 4, 7, 16, 256}) {
    for (const int64_t n : {1, 2, 3, 5, 8, 9, 17, 127, 128, 129, 200, 257}) {
      if (n > 20 && most < 16) continue;
      CAPTURE(most);
      CAPTURE(n);
      std::vector<std::vector<ExchangeRound>> rounds;
      for (int64_t rank = 0; rank < n; ++rank) rounds.push_back(exchange_rounds(n, rank, most));
      CHECK(matched_operations(rounds) == 2 * n * n);
      for (const auto& mine : rounds) {
        CHECK(mine.size() == rounds[0].size());
        for (const ExchangeRound& round : mine) CHECK(round.operations() <= most);
      }
    }
  }
}

TEST_CASE("an all-to-all over NCCL starts at most 256 sends and receives as one group") {
  constexpr int64_t kRanks = 300;
  const auto count = [](int64_t from, int64_t to) { return (from + 2 * to) % 3; };
  std::map<std::pair<std::size_t, std::pair<int64_t, int64_t>>, int64_t> sent, received;  // bytes by call and pair
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    Counts send, receive;
    std::vector<at::Tensor> want;
    for (int64_t other = 0; other < kRanks; ++other) {
      send.push_back(count(rank, other));
      receive.push_back(count(other, rank));
      want.push_back(at::full({receive.back()}, other % 251, at::kByte));
    }
    Recorded recorded(rank, kRanks);
    const int64_t sum = std::accumulate(send.begin(), send.end(), int64_t{0});
    CHECK(all_to_all(at::zeros({sum}, at::kByte), send, receive, recorded.mesh, 0).equal(at::cat(want)));
    REQUIRE(recorded.group->calls.size() == 3);
    for (std::size_t t = 0; t < 3; ++t) {
      const RecordedCall& call = recorded.group->calls[t];
      CHECK(call.operations() <= 256);
      for (int64_t other = 0; other < kRanks; ++other) {
        const auto i = static_cast<std::size_t>(other);
        if (call.send[i] > 0) sent[{t, {rank, other}}] = call.send[i];
        if (call.receive[i] > 0) received[{t, {other, rank}}] = call.receive[i];
      }
    }
  }
  CHECK(sent.size() == kRanks * kRanks / 3 * 2);
  CHECK(sent == received);
}

TEST_CASE("a scatter over NCCL from a rank to more than 256 is an exchange in rounds") {
  for (const int64_t rank : {0, 7, 299}) {
    Recorded recorded(rank, 300);
    const at::Tensor rows = rank == 7 ? at::zeros({300, 2}, at::kByte) : at::Tensor();
    CHECK(scatter(rows, at::zeros({2}, at::kByte), recorded.mesh, 0, 7).equal(at::full({2}, 7, at::kByte)));
    int64_t sends = 0, receives = 0;
    for (const RecordedCall& call : recorded.group->calls) {
      CHECK(call.operations() <= 256);
      sends += 300 - std::ranges::count(call.send, 0);
      receives += 300 - std::ranges::count(call.receive, 0);
    }
    CHECK(sends == (rank == 7 ? 300 : 0));
    CHECK(receives == 1);
  }
  Recorded small(0, 256);
  scatter(at::zeros({256, 2}), at::zeros({2}), small.mesh, 0, 0);
  CHECK(small.group->calls.at(0).kind == "scatter");
}

TEST_CASE("a collective that is waited for at once runs on the caller's stream, a pending one on the group's") {
  Recorded recorded(0, 2);
  const DeviceMesh& mesh = recorded.mesh;
  const at::Tensor x = at::ones({4});
  const Counts even = {2, 2};
  const auto own_stream = [&](const char* kind) {
    CHECK(recorded.group->calls.back().kind == kind);
    return recorded.group->calls.back().on_own_stream;
  };
  all_reduce(x, mesh, 0, ReduceOp::kAvg);
  CHECK_FALSE(own_stream("all_reduce"));
  CHECK(recorded.group->calls.back().op == c10d::ReduceOp::AVG);
  all_gather(x, mesh, 0);
  CHECK_FALSE(own_stream("all_gather"));
  reduce_scatter(x, even, mesh, 0, ReduceOp::kSum);
  CHECK_FALSE(own_stream("reduce_scatter"));
  all_to_all(x, even, even, mesh, 0);
  CHECK_FALSE(own_stream("all_to_all"));
  broadcast(x, mesh, 0, 0);
  CHECK_FALSE(own_stream("broadcast"));
  scatter(x.view({2, 2}), at::zeros({2}), mesh, 0, 0);
  CHECK_FALSE(own_stream("scatter"));

  start_all_reduce(x, mesh, 0, ReduceOp::kSum).wait();
  CHECK(own_stream("all_reduce"));
  start_all_gather(x, {4, 4}, mesh, 0).wait();
  CHECK(own_stream("all_gather"));
  start_reduce_scatter(x, even, mesh, 0, ReduceOp::kSum).wait();
  CHECK(own_stream("reduce_scatter"));
  start_permute(x, even, even, mesh, 0).wait();
  CHECK(own_stream("all_to_all"));
}

TEST_CASE("a redistribution runs on the caller's stream, unless it is asynchronous") {
  Recorded recorded(0, 2);
  const at::Tensor x = from_local(at::ones({2, 3}), recorded.mesh, {Shard(0)});
  redistribute(x, {Replicate()});
  CHECK(recorded.group->calls.size() == 1);
  CHECK_FALSE(recorded.group->calls.back().on_own_stream);
  const at::Tensor later = redistribute(x, {Replicate()}, {.async = true});
  CHECK(recorded.group->calls.back().on_own_stream);
  to_local(later);
}
