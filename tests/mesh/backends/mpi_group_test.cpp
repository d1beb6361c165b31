// Tests the c10d::Backend over MPI itself; //tests/mesh/collectives:collectives_test_mpi tests the library's
// collectives on it. A world of one rank has another backend.

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/world.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/harness/refused.h"

using namespace tessera;
using tessera::testing::check_refused;
using tessera::testing::rank;
using tessera::testing::world;
using tessera::testing::world_size;
using Tensors = std::vector<at::Tensor>;

namespace {

const std::vector<at::ScalarType> kNumbers = {at::kByte,     at::kInt,          at::kLong,         at::kHalf,
                                              at::kBFloat16, at::kChar,         at::kShort,        at::kFloat,
                                              at::kDouble,   at::kComplexFloat, at::kComplexDouble};

c10::intrusive_ptr<c10d::Backend> group() {
  const DeviceMesh mesh = init_device_mesh("cpu", {world_size()}, {"tp"}, world());
  return mesh.group(0);
}

// Returns what a rank holds: small whole numbers.
at::Tensor held(int64_t of, int64_t count, at::ScalarType dtype = at::kFloat) {
  return ((at::arange(count, at::kLong) * (of + 1) + of) % 3 + 1).to(dtype);
}

at::Tensor sum_of_all(int64_t count, at::ScalarType dtype = at::kFloat) {
  at::Tensor sum = at::zeros({count}, at::kLong);
  for (int64_t other = 0; other < world_size(); ++other) sum += held(other, count, at::kLong);
  return sum.to(dtype);
}

// All sizes: none, one, fewer than the ranks, one step, the largest for one step, two steps, several blocks.
const std::vector<int64_t> kCounts = {0, 1, 2, 7, 1000, 4096, 4097, 20011, 3000001};

}  // namespace

TESSERA_RANKS_TEST_CASE("the backend of a world over MPI", {2}) {
  CHECK(world()->cpu_backend() == CpuBackend::kMpi);
  CHECK(group()->getBackendName() == "mpi");
  CHECK(group()->getSize() == 2);
  CHECK(group()->getRank() == rank());
}

TESSERA_RANKS_TEST_CASE("allreduce, of every dtype and of every size", {2, 3, 4}) {
  const auto mpi = group();
  for (const at::ScalarType dtype : kNumbers) {
    CAPTURE(c10::toString(dtype));
    Tensors tensors = {held(rank(), 37, dtype)};
    mpi->allreduce(tensors)->wait();
    CHECK(at::equal(tensors[0], sum_of_all(37, dtype)));
  }
  for (const int64_t count : kCounts) {
    CAPTURE(count);
    Tensors tensors = {held(rank(), count)};
    mpi->allreduce(tensors)->wait();
    CHECK(at::equal(tensors[0], sum_of_all(count)));
  }
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::BOR;
  Tensors bits = {at::full({3}, int64_t{1} << rank(), at::kLong)};
  mpi->allreduce(bits, options)->wait();
  CHECK(at::equal(bits[0], at::full({3}, (int64_t{1} << world_size()) - 1, at::kLong)));
}

TESSERA_RANKS_TEST_CASE("reduce brings the sum to each root and leaves the others' tensors", {2, 3}) {
  const auto mpi = group();
  for (int64_t root = 0; root < world_size(); ++root) {
    for (const int64_t count : kCounts) {
      CAPTURE(count);
      c10d::ReduceOptions options;
      options.rootRank = root;
      Tensors tensors = {held(rank(), count)};
      mpi->reduce(tensors, options)->wait();
      CHECK(at::equal(tensors[0], rank() == root ? sum_of_all(count) : held(rank(), count)));
    }
  }
}

TESSERA_RANKS_TEST_CASE("reduce_scatter in both forms, uneven parts too", {2, 3, 4}) {
  const auto mpi = group();
  const int64_t n = world_size();
  for (const int64_t each : {0, 1, 5, 5000, 500001}) {
    CAPTURE(each);
    at::Tensor input = held(rank(), n * each);
    at::Tensor output = at::empty({each});
    mpi->_reduce_scatter_base(output, input)->wait();
    CHECK(at::equal(output, sum_of_all(n * each).narrow(0, rank() * each, each)));
    // Rank i gives i more elements.
    std::vector<Tensors> lists(1);
    for (int64_t to = 0; to < n; ++to) lists[0].push_back(held(rank(), each + to, at::kDouble));
    Tensors outputs = {at::empty({each + rank()}, at::kDouble)};
    mpi->reduce_scatter(outputs, lists)->wait();
    CHECK(at::equal(outputs[0], sum_of_all(each + rank(), at::kDouble)));
  }
}

TESSERA_RANKS_TEST_CASE("allgather, gather, scatter and broadcast in lists, of tensors of different sizes", {2, 3, 4}) {
  const auto mpi = group();
  const int64_t n = world_size();
  std::vector<Tensors> gathered(1);
  for (int64_t from = 0; from < n; ++from) gathered[0].push_back(at::zeros({from + 1}));
  Tensors mine = {held(rank(), rank() + 1)};
  mpi->allgather(gathered, mine)->wait();
  for (int64_t from = 0; from < n; ++from) CHECK(at::equal(gathered[0][from], held(from, from + 1)));
  for (int64_t root = 0; root < n; ++root) {
    c10d::GatherOptions to_root;
    to_root.rootRank = root;
    std::vector<Tensors> outputs;
    if (rank() == root) outputs.emplace_back(Tensors(gathered[0].size()));
    for (int64_t from = 0; rank() == root && from < n; ++from) outputs[0][from] = at::zeros({from + 1});
    mpi->gather(outputs, mine, to_root)->wait();
    for (int64_t from = 0; rank() == root && from < n; ++from) CHECK(at::equal(outputs[0][from], held(from, from + 1)));
    c10d::ScatterOptions from_root;
    from_root.rootRank = root;
    std::vector<Tensors> inputs;
    if (rank() == root) inputs.push_back(gathered[0]);
    Tensors piece = {at::zeros({rank() + 1})};
    mpi->scatter(piece, inputs, from_root)->wait();
    CHECK(at::equal(piece[0], held(rank(), rank() + 1)));
    c10d::BroadcastOptions options;
    options.rootRank = root;
    for (const int64_t count : kCounts) {
      CAPTURE(count);
      Tensors value = {rank() == root ? held(root, count) : at::zeros({count})};
      mpi->broadcast(value, options)->wait();
      CHECK(at::equal(value[0], held(root, count)));
    }
  }
}

TESSERA_RANKS_TEST_CASE("alltoall by split sizes, by rows and in lists, empty parts too", {2, 3, 4}) {
  const auto mpi = group();
  const int64_t n = world_size();
  // Rank i sends i rows of two elements to each rank, and rank 0 sends none.
  std::vector<int64_t> send(static_cast<std::size_t>(n), rank()), receive;
  std::vector<at::Tensor> want;
  for (int64_t from = 0; from < n; ++from) {
    receive.push_back(from);
    want.push_back(at::full({from, 2}, 10 * from + rank(), at::kLong));
  }
  Tensors parts;
  for (int64_t to = 0; to < n; ++to) parts.push_back(at::full({rank(), 2}, 10 * rank() + to, at::kLong));
  at::Tensor input = at::cat(parts);
  at::Tensor output = at::empty({n * (n - 1) / 2, 2}, at::kLong);
  mpi->alltoall_base(output, input, receive, send)->wait();
  CHECK(at::equal(output, at::cat(want)));
  Tensors lists;
  for (const at::Tensor& each : want) lists.push_back(at::empty_like(each));
  mpi->alltoall(lists, parts)->wait();
  CHECK(at::equal(at::cat(lists), at::cat(want)));
  std::vector<int64_t> even;
  at::Tensor row = at::arange(n) + 10 * rank();
  at::Tensor column = at::empty_like(row);
  mpi->alltoall_base(column, row, even, even)->wait();
  CHECK(at::equal(column, at::arange(n) * 10 + rank()));
}

TESSERA_RANKS_TEST_CASE("messages find each other by their tags, in any order, beside collectives under way", {2}) {
  const auto mpi = group();
  const int peer = static_cast<int>(1 - rank());
  Tensors a = {at::full({3}, rank(), at::kInt)}, b = {at::full({300000}, 10 + rank(), at::kInt)};
  Tensors from_a = {at::empty({3}, at::kInt)}, from_b = {at::empty({300000}, at::kInt)};
  Tensors sum = {held(rank(), 100000)}, other_sum = {held(rank(), 9)};
  // Three collectives and four messages run at once, and are waited for in another order.
  const auto first = mpi->allreduce(sum);
  const auto received_b = mpi->recv(from_b, peer, 7);
  const auto received_a = mpi->recv(from_a, peer, 6);
  const auto sent_a = mpi->send(a, peer, 6);
  const auto second = mpi->allreduce(other_sum);
  const auto met = mpi->barrier();
  const auto sent_b = mpi->send(b, peer, 7);
  for (const auto& work : {received_a, sent_a, second, sent_b, met, received_b, first}) CHECK(work->wait());
  CHECK(at::equal(from_a[0], at::full({3}, peer, at::kInt)));
  CHECK(at::equal(from_b[0], at::full({300000}, 10 + peer, at::kInt)));
  CHECK(at::equal(sum[0], sum_of_all(100000)));
  CHECK(at::equal(other_sum[0], sum_of_all(9)));
  CHECK(received_a->sourceRank() == peer);
}

TESSERA_RANKS_TEST_CASE("a work is under way until it is asked for, unless it was to be done at once", {2}) {
  const auto mpi = group();
  const c10::intrusive_ptr<c10d::Store> store = world()->store();
  const std::string key = "rank 0 has seen its work under way";
  if (rank() == 1) store->wait({key}, std::chrono::seconds(20));
  Tensors tensors = {held(rank(), 50000)};
  const auto work = mpi->allreduce(tensors);
  if (rank() == 0) {
    CHECK_FALSE(work->isCompleted());
    store->set(key, "yes");
  }
  while (!work->isCompleted()) {
  }
  CHECK(work->isSuccess());
  CHECK(at::equal(tensors[0], sum_of_all(50000)));
  c10d::AllreduceOptions at_once;
  at_once.asyncOp = false;
  Tensors others = {held(rank(), 50000)};
  mpi->allreduce(others, at_once);
  CHECK(at::equal(others[0], sum_of_all(50000)));
  // A work that nobody holds still completes.
  Tensors dropped = {held(rank(), 50000)};
  mpi->allreduce(dropped);
  CHECK(at::equal(dropped[0], sum_of_all(50000)));
}

TESSERA_RANKS_TEST_CASE("a wait ends at its time limit and says so, and says the same again", {2}) {
  const auto mpi = group();
  if (rank() == 1) return;
  Tensors tensors = {at::zeros({4})};
  const auto work = mpi->recv(tensors, 1, 0);
  const auto begin = std::chrono::steady_clock::now();
  CHECK_THROWS_WITH_AS(work->wait(std::chrono::milliseconds(200)), doctest::Contains("MPI: timed out after 200 ms"),
                       std::runtime_error);
  CHECK(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() < 2);
  CHECK_THROWS_WITH_AS(work->wait(), doctest::Contains("timed out after 200 ms"), std::runtime_error);
  CHECK(work->isCompleted());
  CHECK_FALSE(work->isSuccess());
}

TESSERA_RANKS_TEST_CASE("a rank that has done its part may leave while others still wait for each other", {3}) {
  const auto mpi = group();
  Tensors tensors = {held(rank(), 9)};
  mpi->allreduce(tensors)->wait();
  CHECK(at::equal(tensors[0], sum_of_all(9)));
  if (rank() == 0) return;
  if (rank() == 1) {
    // This is longer than a wait runs before it looks for ranks that have left.
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    mpi->send(tensors, 2, 0)->wait();
  } else {
    Tensors received = {at::zeros({9})};
    mpi->recv(received, 1, 0)->wait();
    CHECK(at::equal(received[0], sum_of_all(9)));
  }
}

TESSERA_RANKS_TEST_CASE("bad tensors, counts, ranks and tags are refused by name", {2}) {
  const auto mpi = group();
  Tensors none, two = {at::ones({2}), at::ones({2})}, one = {at::ones({2})}, turned = {at::ones({2, 3}).t()};
  Tensors undefined = {at::Tensor()}, conjugate = {at::complex(at::ones({2}), at::ones({2})).conj()};
  check_refused([&] { mpi->allreduce(none); }, "allreduce over MPI: 0 tensors (or lists) were given; give one");
  check_refused([&] { mpi->allreduce(two); }, "2 tensors (or lists) were given");
  check_refused([&] { mpi->allreduce(turned); },
                "a tensor of shape (3, 2) and dtype Float on cpu is not dense, contiguous");
  check_refused([&] { mpi->allreduce(undefined); }, "allreduce over MPI: a tensor is undefined");
  check_refused([&] { mpi->allreduce(conjugate); }, "pass contiguous() ones, with resolve_conj()");
  c10d::BroadcastOptions options;
  options.rootRank = 2;
  check_refused([&] { mpi->broadcast(one, options); }, "broadcast over MPI: rank 2 is outside the group of 2");
  check_refused([&] { mpi->send(one, 2, 0); }, "send over MPI: rank 2 is outside the group of 2");
  check_refused([&] { mpi->recv(one, 0, -1); }, "recv over MPI: tag -1 is outside [0, ");
  at::Tensor input = at::ones({3}), output = at::ones({7}), ints = at::ones({6}, at::kInt);
  check_refused([&] { mpi->_allgather_base(output, input); },
                "7 elements of Float are not 2 times 3 elements of Float");
  check_refused([&] { mpi->_allgather_base(ints, input); }, "6 elements of Int are not 2 times 3 elements of Float");
  check_refused([&] { mpi->_reduce_scatter_base(input, output); }, "_reduce_scatter_base over MPI: 7 elements");
  std::vector<int64_t> counts = {1, 1}, negative = {4, -1}, even;
  check_refused([&] { mpi->alltoall_base(input, input, counts, counts); },
                "split sizes [1, 1] do not divide 3 rows over 2 ranks");
  check_refused([&] { mpi->alltoall_base(input, input, negative, negative); }, "split sizes [4, -1]");
  check_refused([&] { mpi->alltoall_base(input, input, even, even); }, "split sizes [] do not divide 3 rows");
  std::vector<Tensors> lists = {{at::ones({2})}};
  check_refused([&] { mpi->allgather(lists, one); }, "allgather over MPI: 1 tensors were given for 2 ranks");
  std::vector<Tensors> pairs = {{at::ones({2}), at::ones({2})}};
  Tensors longer = {at::ones({3})}, shorter = {at::ones({1})};
  const std::string here = "over MPI: rank " + std::to_string(rank()) + " sends itself ";
  check_refused([&] { mpi->allgather(pairs, longer); }, "allgather " + here + "12 bytes and expects 8");
  c10d::GatherOptions to_here;
  to_here.rootRank = rank();
  check_refused([&] { mpi->gather(pairs, longer, to_here); }, "gather " + here + "12 bytes and expects 8");
  c10d::ScatterOptions from_here;
  from_here.rootRank = rank();
  check_refused([&] { mpi->scatter(shorter, pairs, from_here); }, "scatter " + here + "8 bytes and expects 4");
  c10d::AllreduceOptions average;
  average.reduceOp = c10d::ReduceOp::AVG;
  Tensors whole = {ints};
  check_refused([&] { mpi->allreduce(whole, average); }, "allreduce over MPI: avg of Int is not defined");
  // Nothing was sent, so the group can still be used.
  mpi->allreduce(one)->wait();
  CHECK(at::equal(one[0], at::full({2}, 2.0)));
}

TESSERA_RANKS_TEST_CASE("a message that is shorter than expected is an error, and leaves no old values", {2}) {
  at::Tensor sent = at::ones({3});
  at::Tensor taken = at::zeros({rank() == 0 ? 3 : 4});
  std::vector<int64_t> takes = {2, rank() == 0 ? 1 : 2}, gives = {rank() == 0 ? 2 : 1, rank() == 0 ? 1 : 2};
  const auto exchange = [&] { group()->alltoall_base(taken, sent, takes, gives)->wait(); };
  if (rank() == 0) {
    exchange();
    CHECK(at::equal(taken, sent));
  } else {
    check_refused<std::runtime_error>(exchange,
                                      "a message of member 0 of the group has 4 bytes, where 8 were expected");
  }
}

TESSERA_RANKS_TEST_CASE("two worlds, each with a thread of its own, make groups at the same time", {2, 3}) {
  std::atomic<int> wrong{0};
  const auto run = [&](const std::string& place, float value) {
    WorldOptions options;
    options.rank = options.local_rank = rank();
    options.size = options.local_size = world_size();
    options.cpu_backend = CpuBackend::kMpi;
    options.store = c10::make_intrusive<c10d::PrefixStore>(place, world()->store());
    const DeviceMesh mesh = init_device_mesh("cpu", {world_size()}, {"tp"}, World::create(std::move(options)));
    for (int i = 1; i <= 20; ++i) {
      const at::Tensor sum = all_reduce(at::full({1000}, value * static_cast<float>(i)), mesh, 0, ReduceOp::kSum);
      const float expected = value * static_cast<float>(i * world_size());
      wrong += sum.eq(expected).all().item<bool>() ? 0 : 1;
    }
  };
  for (int round = 0; round < 3; ++round) {
    std::thread other(run, "other" + std::to_string(round), 1.0F);
    run("own" + std::to_string(round), 2.0F);
    other.join();
  }
  CHECK(wrong == 0);
}
