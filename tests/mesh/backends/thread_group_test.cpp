// Tests the process group of ranks that are threads through c10d's interface.
#include "tessera/mesh/backends/thread_group.h"

#include <chrono>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/mesh/core/mismatch.h"
#include "tessera/mesh/in_process.h"
#include "tessera/tests/harness/refused.h"

using namespace tessera;
using tessera::testing::check_refused;
using RedOp = c10d::ReduceOp::RedOpType;
using Tensors = std::vector<at::Tensor>;

namespace {

// Runs `body` with the group of all ranks, on 1, 2, 3, 4 and 8 ranks.
void on_sizes(const std::function<void(c10d::Backend& group, int64_t me, int64_t n)>& body) {
  for (const int64_t size : {1, 2, 3, 4, 8}) {
    CAPTURE(size);
    run_in_process(size, [&](const std::shared_ptr<World>& world) {
      std::vector<int64_t> ranks(static_cast<std::size_t>(size));
      std::iota(ranks.begin(), ranks.end(), 0);
      body(*world->group(ranks, c10::kCPU), world->rank(), size);
    });
  }
}

std::vector<c10::intrusive_ptr<c10d::Backend>> make_groups(int size, std::chrono::milliseconds timeout,
                                                           std::vector<BackendGroup>* whole = nullptr) {
  const auto hub = std::make_shared<ThreadHub>();
  std::vector<int64_t> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(10 + rank);
  std::vector<c10::intrusive_ptr<c10d::Backend>> groups;
  for (int rank = 0; rank < size; ++rank) {
    const BackendGroup made =
        make_thread_group(hub, {.store = {}, .rank = rank, .size = size, .ranks = ranks, .timeout = timeout});
    groups.push_back(made.backend);
    if (whole != nullptr) whole->push_back(made);
  }
  return groups;
}

at::Tensor filled(int64_t value, at::IntArrayRef shape = {2, 3}, at::ScalarType dtype = at::kLong) {
  return at::full(shape, value, dtype);
}

// Each of two ranks starts its own collective; waiting for either work throws `part`.
void check_mismatch(const std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)>& first,
                    const std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)>& second,
                    const std::string& part) {
  const auto groups = make_groups(2, std::chrono::seconds(10));
  const auto a = first(*groups[0]);
  const auto b = second(*groups[1]);
  check_refused<MismatchError>([&] { a->wait(); }, part);
  check_refused<MismatchError>([&] { b->wait(); }, part);
  CHECK(a->isCompleted());
  CHECK_FALSE(a->isSuccess());
  CHECK(a->exception() != nullptr);
}

}  // namespace

TEST_CASE("reductions are those of all ranks' tensors, in the order of ranks") {
  struct Row {
    RedOp op;
    at::ScalarType dtype;
    std::function<at::Tensor(const at::Tensor& rows)> want;
  };
  const auto folded = [](const std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>& f) {
    return [f](const at::Tensor& rows) {
      at::Tensor sum = rows[0].clone();
      for (int64_t i = 1; i < rows.size(0); ++i) sum = f(sum, rows[i]);
      return sum;
    };
  };
  const std::vector<Row> rows = {
      {RedOp::SUM, at::kFloat, folded([](const auto& a, const auto& b) { return a + b; })},
      {RedOp::SUM, at::kBFloat16, folded([](const auto& a, const auto& b) { return a + b; })},
      {RedOp::SUM, at::kComplexDouble, folded([](const auto& a, const auto& b) { return a + b; })},
      {RedOp::AVG, at::kDouble, [](const at::Tensor& all) { return all.mean(0); }},
      {RedOp::PRODUCT, at::kInt, folded([](const auto& a, const auto& b) { return a * b; })},
      {RedOp::MIN, at::kShort, [](const at::Tensor& all) { return at::amin(all, {0}); }},
      {RedOp::MAX, at::kHalf, [](const at::Tensor& all) { return at::amax(all, {0}); }},
      {RedOp::MAX, at::kBool, [](const at::Tensor& all) { return at::amax(all, {0}); }},
      {RedOp::BAND, at::kByte, folded([](const auto& a, const auto& b) { return a.bitwise_and(b); })},
      {RedOp::BOR, at::kLong, folded([](const auto& a, const auto& b) { return a.bitwise_or(b); })},
      {RedOp::BXOR, at::kInt, folded([](const auto& a, const auto& b) { return a.bitwise_xor(b); })},
  };
  for (const Row& row : rows) {
    CAPTURE(c10::toString(row.dtype));
    on_sizes([&](c10d::Backend& group, int64_t me, int64_t n) {
      const at::Tensor all = ((at::arange(n * n * 6) * 7) % 11).reshape({n, n, 6}).to(row.dtype);
      const at::Tensor mine = all[me];
      Tensors sum = {mine[0].clone()};
      group.allreduce(sum, {.reduceOp = row.op})->wait();
      CHECK(at::equal(sum[0], row.want(all.select(1, 0))));
      Tensors rooted = {mine[0].clone()};
      group.reduce(rooted, {.reduceOp = row.op, .rootRank = n - 1})->wait();
      CHECK(at::equal(rooted[0], me == n - 1 ? row.want(all.select(1, 0)) : mine[0]));
      at::Tensor piece = at::empty({6}, row.dtype);
      at::Tensor input = mine.clone();
      group._reduce_scatter_base(piece, input, {.reduceOp = row.op})->wait();
      CHECK(at::equal(piece, row.want(all.select(1, me))));
      Tensors pieces = {at::empty({6}, row.dtype)};
      std::vector<Tensors> inputs = {mine.unbind(0)};
      group.reduce_scatter(pieces, inputs, {.reduceOp = row.op})->wait();
      CHECK(at::equal(pieces[0], piece));
    });
  }
}

TEST_CASE("a sum of 16-bit floats is rounded once") {
  on_sizes([](c10d::Backend& group, int64_t me, int64_t n) {
    if (n < 3) return;
    // From 256 on bfloat16 has every second number: terms of 1 that are added one by one to 256 are lost.
    const at::Tensor mine = at::full({n}, me == 1 ? 256 : 1, at::kBFloat16);
    const at::Tensor want = at::full({n}, 256 + (n - 1), at::kFloat).to(at::kBFloat16);
    Tensors sum = {mine.clone()};
    group.allreduce(sum)->wait();
    CHECK(at::equal(sum[0], want));
    at::Tensor piece = at::empty({1}, at::kBFloat16), input = mine.clone();
    group._reduce_scatter_base(piece, input)->wait();
    CHECK(at::equal(piece, want.slice(0, 0, 1)));
    // 60000 + 30000 is no float16.
    const at::Tensor large = at::full({n}, me == 0 ? 60000 : me == 1 ? 30000 : me == 2 ? -40000 : 0, at::kHalf);
    sum = {large};
    group.allreduce(sum)->wait();
    CHECK(at::equal(sum[0], at::full({n}, 50000, at::kHalf)));
  });
}

TEST_CASE("gathers, scatters and broadcasts bring each rank's tensor to its place, whatever its strides") {
  on_sizes([](c10d::Backend& group, int64_t me, int64_t n) {
    const auto size = static_cast<std::size_t>(n);
    const at::Tensor turned = (at::arange(6) + 100 * me).reshape({3, 2}).t();
    Tensors inputs = {turned};
    std::vector<Tensors> outputs(1);
    for (std::size_t i = 0; i < size; ++i) outputs[0].push_back(at::zeros({2, 3}, at::kLong));
    group.allgather(outputs, inputs)->wait();
    for (int64_t i = 0; i < n; ++i) {
      CHECK(at::equal(outputs[0][static_cast<std::size_t>(i)], (at::arange(6) + 100 * i).reshape({3, 2}).t()));
    }
    at::Tensor base_output = at::empty({n, 6}, at::kLong);
    at::Tensor base_input = at::arange(6) + 100 * me;
    group._allgather_base(base_output, base_input)->wait();
    CHECK(at::equal(base_output, at::arange(6) + 100 * at::arange(n).unsqueeze(1)));

    const int64_t root = n / 2;
    std::vector<Tensors> gathered;
    if (me == root) gathered.emplace_back(Tensors(at::zeros({n, 2}, at::kLong).unbind(0)));
    Tensors mine = {filled(me, {2})};
    group.gather(gathered, mine, {.rootRank = root})->wait();
    if (me == root) CHECK(at::equal(at::stack(gathered[0]).select(1, 0), at::arange(n)));
    std::vector<Tensors> scattered;
    if (me == root) scattered.emplace_back(Tensors(at::arange(2 * n).reshape({2, n}).unbind(1)));
    Tensors piece = {at::zeros({2}, at::kLong)};
    group.scatter(piece, scattered, {.rootRank = root})->wait();
    CHECK(at::equal(piece[0], at::tensor({me, n + me}, at::kLong)));
    Tensors value = {me == root ? at::arange(6).reshape({3, 2}).t() : at::zeros({2, 3}, at::kLong)};
    group.broadcast(value, {.rootRank = root})->wait();
    CHECK(at::equal(value[0], at::arange(6).reshape({3, 2}).t()));
    group.barrier()->wait();
  });
}

TEST_CASE("all_to_all moves even, uneven and empty pieces, as rows or as lists") {
  on_sizes([](c10d::Backend& group, int64_t me, int64_t n) {
    // Rank i sends (i + 2 j) % 3 rows of value 10 i + j to rank j.
    std::vector<int64_t> send, receive;
    Tensors out, in, want;
    for (int64_t other = 0; other < n; ++other) {
      send.push_back((me + 2 * other) % 3);
      receive.push_back((other + 2 * me) % 3);
      in.push_back(filled(10 * me + other, {send.back(), 2}));
      want.push_back(filled(10 * other + me, {receive.back(), 2}));
      out.push_back(at::zeros_like(want.back()));
    }
    at::Tensor rows = at::zeros_like(at::cat(want));
    at::Tensor given = at::cat(in);
    group.alltoall_base(rows, given, receive, send)->wait();
    CHECK(at::equal(rows, at::cat(want)));
    group.alltoall(out, in)->wait();
    for (std::size_t i = 0; i < want.size(); ++i) CHECK(at::equal(out[i], want[i]));
    std::vector<int64_t> even;
    at::Tensor column = at::arange(n) + 10 * me;
    at::Tensor row = at::empty({n}, at::kLong);
    group.alltoall_base(row, column, even, even)->wait();
    CHECK(at::equal(row, 10 * at::arange(n) + me));
    at::Tensor nothing = at::empty({0}, at::kFloat), place = at::empty({0}, at::kFloat);
    group.alltoall_base(place, nothing, even, even)->wait();
  });
}

TEST_CASE("messages find each other by tag, in order, all posted before any is waited for") {
  on_sizes([](c10d::Backend& group, int64_t me, int64_t n) {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    std::vector<Tensors> kept;
    std::vector<int64_t> want;
    const auto peer = [](int64_t rank) { return static_cast<int>(rank); };
    for (int64_t other = 0; other < n; ++other) {
      // Uneven: i sends j i + 1 messages, their tags counting down on one side.
      for (int64_t k = 0; k <= me; ++k) {
        Tensors message = {filled(100 * me + 10 * other + k, {k + 1})};
        works.push_back(group.send(message, peer(other), peer(k)));
      }
      for (int64_t k = other; k >= 0; --k) {
        kept.push_back({filled(-1, {k + 1})});
        want.push_back(100 * other + 10 * me + k);
        works.push_back(group.recv(kept.back(), peer(other), peer(k)));
      }
    }
    for (auto it = works.rbegin(); it != works.rend(); ++it) CHECK((*it)->wait());
    for (std::size_t i = 0; i < kept.size(); ++i) CHECK(kept[i][0].eq(want[i]).all().item<bool>());
  });
  const auto groups = make_groups(2, std::chrono::seconds(10));
  Tensors one = {filled(1)}, two = {filled(2)}, a = {filled(0)}, b = {filled(0)};
  const auto first = groups[0]->send(one, 1, 5);
  const auto second = groups[0]->send(two, 1, 5);
  CHECK_FALSE(first->isCompleted());
  groups[1]->recv(a, 0, 5)->wait();
  CHECK(first->isCompleted());
  CHECK_FALSE(second->isCompleted());
  groups[1]->recv(b, 0, 5)->wait();
  CHECK(a[0].eq(1).all().item<bool>());
  CHECK(b[0].eq(2).all().item<bool>());
}

TEST_CASE("ranks that disagree all get an error that lists what each passed") {
  const auto reduce = [](RedOp op, const at::Tensor& tensor) {
    return [op, tensor](c10d::Backend& group) {
      Tensors tensors = {tensor};
      return group.allreduce(tensors, {.reduceOp = op});
    };
  };
  const auto broadcast = [](int64_t root, const at::Tensor& tensor) {
    return [root, tensor](c10d::Backend& group) {
      Tensors tensors = {tensor};
      return group.broadcast(tensors, {.rootRank = root});
    };
  };
  check_mismatch(
      reduce(RedOp::SUM, filled(1)), broadcast(0, filled(1)),
      "the ranks disagree on collective 0 of their group: ranks 10 and 11 issue different operations; ranks [10]: "
      "all_reduce sum of Long (2, 3); ranks [11]: broadcast with root 0 of Long (2, 3)");
  check_mismatch(reduce(RedOp::SUM, filled(1)), reduce(RedOp::MAX, filled(1)),
                 "ranks [11]: all_reduce max of Long (2, 3)");
  check_mismatch(
      reduce(RedOp::SUM, filled(1)), reduce(RedOp::SUM, filled(1, {3, 2})),
      "rank 11 gives rank 10 Long (3, 2) but Long (2, 3) is expected; ranks [10]: all_reduce sum of Long (2, 3)");
  check_mismatch(reduce(RedOp::SUM, filled(1, {2}, at::kFloat)), reduce(RedOp::SUM, filled(1, {2}, at::kInt)),
                 "rank 11 gives rank 10 Int (2) but Float (2) is expected");
  check_mismatch(broadcast(0, filled(1)), broadcast(1, filled(1)), "ranks [11]: broadcast with root 1 of Long (2, 3)");
  const auto exchange = [](std::vector<int64_t> receive, std::vector<int64_t> send) {
    return [receive, send](c10d::Backend& group) mutable {
      at::Tensor output = at::zeros({receive[0] + receive[1]}), input = at::zeros({send[0] + send[1]});
      return group.alltoall_base(output, input, receive, send);
    };
  };
  check_mismatch(exchange({1, 2}, {1, 3}), exchange({4, 0}, {2, 0}),
                 "rank 10 gives rank 11 3 elements of Float but 4 of Float are expected; ranks [10]: all_to_all, gives "
                 "Float x [1, 3], takes Float x [1, 2]; ranks [11]: all_to_all, gives Float x [2, 0], takes Float x "
                 "[4, 0]");
  const auto send = [](c10d::Backend& group) {
    Tensors tensors = {filled(1, {3})};
    return group.send(tensors, 1, 7);
  };
  const auto receive = [](c10d::Backend& group) {
    Tensors tensors = {filled(1, {4})};
    return group.recv(tensors, 0, 7);
  };
  check_mismatch(send, receive, "rank 10 sends rank 11 with tag 7 Long (3) but Long (4) is expected");
}

TEST_CASE("one rank's own bad arguments are told to every rank of the group") {
  const auto barrier = [](c10d::Backend& group) { return group.barrier(); };
  const auto bad = [&](const std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)>& call,
                       const std::string& part) { check_mismatch(barrier, call, "rank 11: " + part); };
  bad(
      [](c10d::Backend& group) {
        Tensors tensors = {filled(1), filled(1)};
        return group.allreduce(tensors);
      },
      "all_reduce: 2 tensors were given; give 1");
  bad(
      [](c10d::Backend& group) {
        Tensors tensors = {filled(1)};
        return group.broadcast(tensors, {.rootRank = 2});
      },
      "broadcast: root 2 is outside [0, 2); pass the position in the group");
  bad(
      [](c10d::Backend& group) {
        Tensors tensors = {at::Tensor()};
        return group.allreduce(tensors);
      },
      "all_reduce: a tensor of no type cannot be sent between threads");
  bad(
      [](c10d::Backend& group) {
        Tensors tensors = {at::ones({2}).to_sparse()};
        return group.allreduce(tensors);
      },
      "all_reduce: a tensor of SparseCPUFloatType cannot be sent between threads; give a dense tensor on cpu");
  bad(
      [](c10d::Backend& group) {
        at::Tensor output = at::ones({4}).expand({3, 4}), input = at::ones({6});
        return group._allgather_base(output, input);
      },
      "all_gather: the tensor is not contiguous");
  bad(
      [](c10d::Backend& group) {
        at::Tensor output = at::ones({5}), input = at::ones({2});
        return group._allgather_base(output, input);
      },
      "all_gather: a tensor of 5 elements does not hold [2, 2]");
  bad(
      [](c10d::Backend& group) {
        std::vector<int64_t> even, uneven = {2, 2};
        at::Tensor output = at::ones({4}), input = at::ones({3});
        return group.alltoall_base(output, input, uneven, even);
      },
      "all_to_all: splits [] do not cut 3 rows for 2 ranks");
  bad(
      [](c10d::Backend& group) {
        std::vector<int64_t> receive = {2, 2}, send = {4, -1};
        at::Tensor output = at::ones({4}), input = at::ones({3});
        return group.alltoall_base(output, input, receive, send);
      },
      "all_to_all: a tensor of 3 elements does not hold [4, -1]");
  const auto groups = make_groups(2, std::chrono::seconds(10));
  Tensors tensors = {filled(1)};
  check_refused<std::invalid_argument>([&] { groups[0]->send(tensors, 2, 0); }, "rank 2 is outside [0, 2)");
}

TEST_CASE("what ATen cannot reduce is an error on every rank") {
  const auto groups = make_groups(2, std::chrono::seconds(10));
  Tensors first = {filled(1)}, second = {filled(1)};
  const auto a = groups[0]->allreduce(first, {.reduceOp = RedOp::AVG});
  const auto b = groups[1]->allreduce(second, {.reduceOp = RedOp::AVG});
  check_refused<std::runtime_error>([&] { a->wait(); }, "avg of Long is not defined");
  check_refused<std::runtime_error>([&] { b->wait(); }, "avg of Long is not defined");
  CHECK(at::equal(first[0], filled(1)));
  groups[0]->barrier();
  groups[1]->barrier()->wait();
}

TEST_CASE("a wait that times out names the missing ranks, and the collective fails for those that arrive later") {
  const auto groups = make_groups(3, std::chrono::milliseconds(30));
  Tensors tensors = {filled(1)};
  const auto first = groups[0]->allreduce(tensors);
  const auto second = groups[2]->allreduce(tensors);
  const char* const text = "timed out after 30 ms in all_reduce sum of Long (2, 3): ranks [11] did not come";
  check_refused<std::runtime_error>([&] { first->wait(); }, text);
  check_refused<std::runtime_error>([&] { second->wait(); }, text);
  const auto late = groups[1]->allreduce(tensors);
  check_refused<std::runtime_error>([&] { late->wait(); }, text);
  check_refused<std::runtime_error>([&] { groups[0]->barrier({.timeout = std::chrono::milliseconds(5)})->wait(); },
                                    "timed out after 5 ms in barrier: ranks [11, 12] did not come");
  check_refused<std::runtime_error>([&] { groups[0]->recv(tensors, 2, 4)->wait(std::chrono::milliseconds(7)); },
                                    "timed out after 7 ms in a receive from rank 12 with tag 4");
  // The receive that was given up does not take the message.
  const auto sent = groups[2]->send(tensors, 0, 4);
  CHECK_FALSE(sent->isCompleted());
  check_refused<std::runtime_error>([&] { sent->wait(); }, "a send to rank 10 with tag 4");
}

TEST_CASE("closing a group ends its waits and all that comes later") {
  std::vector<BackendGroup> whole;
  const auto groups = make_groups(2, std::chrono::minutes(5), &whole);
  Tensors tensors = {filled(1)};
  const auto round = groups[0]->allreduce(tensors);
  const auto message = groups[0]->recv(tensors, 1, 0);
  std::thread closer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    whole[1].close();
    whole[1].close();
  });
  check_refused<std::runtime_error>([&] { round->wait(); }, "the group was closed");
  closer.join();
  check_refused<std::runtime_error>([&] { message->wait(); }, "the group was closed");
  check_refused<std::runtime_error>([&] { groups[1]->barrier()->wait(); }, "the group was closed");
  check_refused<std::runtime_error>([&] { groups[1]->send(tensors, 0, 0)->wait(); }, "the group was closed");
}
