#include "tessera/mesh/in_process.h"

#include <array>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <future>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/mesh/collectives/checked.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/core/mismatch.h"
#include "tessera/mesh/record_file.h"
#include "tessera/tests/harness/refused.h"
#include "tessera/tools/launcher/private_folder.h"

using namespace tessera;
using tessera::testing::check_refused;

namespace {

using WorldPtr = std::shared_ptr<World>;
constexpr std::array<int64_t, 5> kSizes = {1, 2, 3, 4, 8};
constexpr std::array<ReduceOp, 5> kOps = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kMin,
                                          ReduceOp::kProduct};

DeviceMesh line(const WorldPtr& world) { return init_device_mesh("cpu", {world->size()}, {"tp"}, world); }

// Returns what a rank holds: small whole numbers, exact in every dtype, different on each rank.
at::Tensor held(int64_t rank, at::ScalarType dtype, at::IntArrayRef shape, int64_t seed = 0) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return ((at::arange(count, at::kLong) * (rank + 1) + rank + seed) % 3).reshape(shape).to(dtype);
}

// Returns the reduction, computed in float64, of what `ranks` hold.
at::Tensor reduced(ReduceOp op, const std::vector<int64_t>& ranks, at::ScalarType dtype, at::IntArrayRef shape,
                   int64_t seed = 0) {
  std::vector<at::Tensor> all;
  for (const int64_t rank : ranks) all.push_back(held(rank, dtype, shape, seed).to(at::kDouble));
  const at::Tensor rows = at::stack(all);
  const at::Tensor result = op == ReduceOp::kSum   ? rows.sum(0)
                            : op == ReduceOp::kAvg ? rows.mean(0)
                            : op == ReduceOp::kMax ? at::amax(rows, {0})
                            : op == ReduceOp::kMin ? at::amin(rows, {0})
                                                   : rows.prod(0);
  return result.to(dtype);
}

// Sets an environment variable while it lives. No other thread may read the environment then.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) { setenv(name, value.c_str(), 1); }
  ~Variable() { unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* const name_;
};

}  // namespace

TEST_CASE("each rank is a thread with a world of its own") {
  for (const int64_t size : kSizes) {
    std::mutex mutex;
    std::set<int64_t> ranks;
    std::set<uint64_t> ids;
    std::set<std::thread::id> threads;
    run_in_process(size, [&](const WorldPtr& world) {
      CHECK(world->size() == size);
      CHECK(world->local_rank() == world->rank());
      CHECK(world->local_size() == size);
      CHECK_FALSE(world->is_fake());
      const std::lock_guard lock(mutex);
      ranks.insert(world->rank());
      ids.insert(world->id());
      threads.insert(std::this_thread::get_id());
    });
    CHECK(ranks.size() == static_cast<std::size_t>(size));
    CHECK(*ranks.rbegin() == size - 1);
    CHECK(ids.size() == ranks.size());
    CHECK(threads.size() == ranks.size());
  }
  CHECK_THROWS_WITH_AS(run_in_process(0, [](const WorldPtr&) {}),
                       "an in-process world of 0 ranks is impossible; give at least 1", std::invalid_argument);
}

TEST_CASE("every collective gives what a direct computation gives") {
  for (const int64_t size : kSizes) {
    CAPTURE(size);
    std::vector<int64_t> ranks(static_cast<std::size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    run_in_process(size, [&](const WorldPtr& world) {
      const DeviceMesh mesh = line(world);
      const int64_t me = world->rank();
      for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kLong, at::kShort}) {
        for (const ReduceOp op : kOps) {
          if (op == ReduceOp::kAvg && c10::isIntegralType(dtype, false)) continue;
          CHECK(at::equal(all_reduce(held(me, dtype, {2, 3}), mesh, 0, op), reduced(op, ranks, dtype, {2, 3})));
          CHECK(at::equal(reduce_scatter(held(me, dtype, {size, 5}), mesh, 0, op),
                          reduced(op, ranks, dtype, {size, 5})[me]));
        }
        const at::Tensor rows = all_gather(held(me, dtype, {3, 2}), mesh, 0);
        for (int64_t rank = 0; rank < size; ++rank) {
          CHECK(at::equal(rows[rank], held(rank, dtype, {3, 2})));
          CHECK(at::equal(broadcast(held(me, dtype, {4}), mesh, 0, rank), held(rank, dtype, {4})));
          const at::Tensor given = me == rank ? held(rank, dtype, {size, 2}) : at::Tensor();
          CHECK(at::equal(scatter(given, at::empty({2}, dtype), mesh, 0, rank), held(rank, dtype, {size, 2})[me]));
        }
      }
      const at::Tensor large = all_gather(held(me, at::kInt, {100000}), mesh, 0);
      for (int64_t rank = 0; rank < size; ++rank) CHECK(at::equal(large[rank], held(rank, at::kInt, {100000})));
      barrier(mesh, 0);
    });
  }
}

TEST_CASE("uneven and empty pieces are sent, and no rank waits for empty tensors") {
  for (const int64_t size : kSizes) {
    run_in_process(size, [&](const WorldPtr& world) {
      const DeviceMesh mesh = line(world);
      const int64_t me = world->rank();
      std::vector<int64_t> send, receive;
      std::vector<at::Tensor> given, want;
      for (int64_t other = 0; other < size; ++other) {
        send.push_back((me + 2 * other) % 3);
        receive.push_back((other + 2 * me) % 3);
        given.push_back(at::full({send.back()}, 10 * me + other, at::kInt));
        want.push_back(at::full({receive.back()}, 10 * other + me, at::kInt));
      }
      CHECK(at::equal(all_to_all(at::cat(given), send, receive, mesh, 0), at::cat(want)));
      const std::vector<int64_t> none(static_cast<std::size_t>(size), 0);
      CHECK(all_to_all(at::empty({0}), none, none, mesh, 0).numel() == 0);
      CHECK(all_gather(at::empty({0, 3}), mesh, 0).sizes() == at::IntArrayRef({size, 0, 3}));
      CHECK(all_reduce(at::empty({0}), mesh, 0, ReduceOp::kSum).numel() == 0);
    });
  }
}

TEST_CASE("each dimension of a 2x2x2 mesh has its own groups") {
  run_in_process(8, [](const WorldPtr& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2, 2}, {"pp", "dp", "tp"}, world);
    const at::Tensor mine = at::full({1}, world->rank(), at::kLong);
    for (const char* name : {"pp", "dp", "tp"}) {
      const DeviceMesh slice = mesh[name];
      const std::vector<int64_t>& ranks = slice.group_ranks(0);
      CHECK(all_reduce(mine, slice, 0, ReduceOp::kSum).item<int64_t>() == ranks[0] + ranks[1]);
      CHECK(at::equal(all_gather(mine, mesh, mesh.mesh().mesh_dim(name)).flatten(),
                      at::tensor({ranks[0], ranks[1]}, at::kLong)));
    }
    const DeviceMesh plane = mesh[{"tp", "pp"}];
    const int64_t sum =
        all_reduce(all_reduce(mine, plane, 0, ReduceOp::kSum), plane, 1, ReduceOp::kSum).item<int64_t>();
    CHECK(sum == (mesh.local_rank("dp") == 0 ? 0 + 1 + 4 + 5 : 2 + 3 + 6 + 7));
  });
}

TEST_CASE("a thousand random collectives on random dimensions agree with direct computation") {
  run_in_process(8, [](const WorldPtr& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2, 2}, {"pp", "dp", "tp"}, world);
    const DeviceMesh flat = line(world);
    CommCounter counter(mesh);
    std::mt19937 random(20240517);
    const auto draw = [&](uint32_t n) { return static_cast<int64_t>(random() % n); };
    int64_t wrong = 0;
    for (int64_t i = 0; i < 1000; ++i) {
      const int64_t dim = draw(4);
      const DeviceMesh& where = dim == 3 ? flat : mesh;
      const int64_t mesh_dim = dim % 3;
      const std::vector<int64_t>& ranks = where.group_ranks(mesh_dim);
      const auto n = static_cast<int64_t>(ranks.size());
      const at::ScalarType dtype = std::array{at::kFloat, at::kDouble, at::kHalf}[static_cast<std::size_t>(draw(3))];
      const ReduceOp op = kOps[static_cast<std::size_t>(draw(5))];
      const std::vector<int64_t> shape = {n, 1 + draw(6)};
      const int64_t kind = draw(4), source = draw(static_cast<uint32_t>(n));
      const at::Tensor mine = held(world->rank(), dtype, shape, i);
      const at::Tensor whole = reduced(op, ranks, dtype, shape, i);
      const int64_t me = where.local_rank(mesh_dim);
      const auto of = [&](int64_t place) { return held(ranks[static_cast<std::size_t>(place)], dtype, shape, i); };
      const bool right = kind == 0   ? at::equal(all_reduce(mine, where, mesh_dim, op), whole)
                         : kind == 1 ? at::equal(reduce_scatter(mine, where, mesh_dim, op), whole[me])
                         : kind == 2 ? at::equal(all_gather(mine, where, mesh_dim)[source], of(source))
                                     : at::equal(broadcast(mine, where, mesh_dim, source), of(source));
      wrong += right ? 0 : 1;
    }
    CHECK(wrong == 0);
    CHECK(counter.total() == 1000);
  });
}

TEST_CASE("the error of the rank that failed first ends the run and names the rank") {
  const auto run = [](int64_t size) {
    run_in_process(size, [size](const WorldPtr& world) {
      const DeviceMesh mesh = line(world);
      barrier(mesh, 0);
      if (world->rank() == size - 1) throw std::out_of_range("index 7 is out of range");
      const World::Scope scope(*world, "aten::mm");
      const auto call = [&] { all_reduce(at::ones({2}), mesh, 0, ReduceOp::kSum); };
      check_refused<std::runtime_error>(call, "index 7 is out of range");
      check_refused<std::runtime_error>(call, "the job has failed");
      call();
    });
  };
  for (const int64_t size : kSizes)
    check_refused<std::runtime_error>([&] { run(size); }, std::to_string(size) + ": index 7 is out of range");
  const auto start = std::chrono::steady_clock::now();
  try {
    run(3);
  } catch (const std::runtime_error& error) {
    CHECK(std::string(error.what()) == "rank 2 of 3: index 7 is out of range");
    CHECK_THROWS_WITH_AS(std::rethrow_if_nested(error), "index 7 is out of range", std::out_of_range);
  }
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(2));
  check_refused<std::runtime_error>(
      [] { run_in_process(2, [](const WorldPtr& world) { world->rank() == 1 ? throw 7 : barrier(line(world), 0); }); },
      "rank 1 of 2: an exception that is not a std::exception");
}

TEST_CASE("with TESSERA_RECORDS a rank that throws leaves the records of all ranks") {
  const PrivateFolder folder;
  const auto run = [] {
    run_in_process(3, [](const WorldPtr& world) {
      const DeviceMesh mesh = line(world);
      barrier(mesh, 0);
      if (world->rank() == 1) throw std::out_of_range("index 7 is out of range");
      all_reduce(at::ones({2}), mesh, 0, ReduceOp::kSum);
    });
  };
  const auto check_written = [](const std::string& where) {
    const std::vector<RankRecords> written = read_all_records(where);
    REQUIRE(written.size() == 3);
    for (const RankRecords& one : written) {
      CAPTURE(one.rank);
      CHECK(doctest::String(one.failure.c_str()) == doctest::Contains("index 7 is out of range"));
      REQUIRE_FALSE(one.records.empty());
      CHECK(one.records.front().name == "barrier");
    }
  };
  check_refused<std::runtime_error>(run, "rank 1 of 3");
  CHECK(std::filesystem::is_empty(folder.path()));
  const Variable records("TESSERA_RECORDS", folder.path());
  check_refused<std::runtime_error>(run, "rank 1 of 3");
  check_written(folder.path());
  const Variable restart("TORCHELASTIC_RESTART_COUNT", "2");
  check_refused<std::runtime_error>(run, "rank 1 of 3");
  check_written(folder.path() + "/restart_2");
}

TEST_CASE("with TESSERA_RECORDS ranks that differ under Checked leave their records, and may go on") {
  const PrivateFolder folder;
  const Variable variable("TESSERA_RECORDS", folder.path());
  run_in_process(2, [](const WorldPtr& world) {
    const DeviceMesh mesh = line(world);
    const Checked checked(mesh);
    barrier(mesh, 0);
    const at::Tensor mine = at::ones({2 + world->rank()});
    CHECK_THROWS_AS(all_reduce(mine, mesh, 0, ReduceOp::kSum), MismatchError);
    barrier(mesh, 0);
  });
  const std::vector<RankRecords> written = read_all_records(folder.path());
  REQUIRE(written.size() == 2);
  for (const RankRecords& one : written) {
    CAPTURE(one.rank);
    CHECK(doctest::String(one.failure.c_str()) == doctest::Contains("all_reduce"));
    REQUIRE(one.records.size() == 2);
    CHECK(one.records.back().name == "all_reduce");
    CHECK(one.records.back().has_ended());
  }
}

TEST_CASE("records go to the folder that a relative path named when the world was made") {
  const PrivateFolder folder;
  const std::filesystem::path before = std::filesystem::current_path();
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<WorldPtr> worlds;
  std::filesystem::current_path(folder.path());
  for (const int64_t rank : {0, 1}) {
    WorldOptions options;
    options.rank = options.local_rank = rank;
    options.size = options.local_size = 2;
    options.store = store;
    options.records_folder = "records";
    worlds.push_back(World::create(options));
  }
  std::filesystem::current_path(before);
  worlds[1]->fail("loss", "not a number");
  const std::vector<RankRecords> written = read_all_records(folder.path() + "/records");
  REQUIRE(written.size() == 1);
  CHECK(written[0].rank == 1);
}

TEST_CASE("a failure reaches ranks that share no group with the one that failed") {
  const auto run = [] {
    run_in_process(4, [](const WorldPtr& world) {
      const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world);
      if (world->rank() == 3) throw std::out_of_range("index 7");
      // Rank 2 waits for 3, rank 0 for 2, and rank 1 for 0.
      const int64_t dim = world->rank() == 2 ? 1 : world->rank() == 0 ? 0 : 1;
      check_refused<std::runtime_error>([&] { all_reduce(at::ones({2}), mesh, dim, ReduceOp::kSum); },
                                        "rank 3 failed in the body of run_in_process");
    });
  };
  check_refused<std::runtime_error>(run, "rank 3 of 4: index 7");
}

TEST_CASE("a waiting rank gets the failure of one that has not joined the group yet, and can go on") {
  std::promise<std::string> heard;
  std::future<std::string> text = heard.get_future();
  bool in_time = false;
  const auto body = [&](const WorldPtr& world) {
    if (world->rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the other rank waits by then
      world->fail("somewhere", "an error of its own");
      in_time = text.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
      return;
    }
    try {
      all_reduce(at::ones({1}), line(world), 0, ReduceOp::kSum);
      heard.set_value("nothing");
    } catch (const std::exception& error) {
      heard.set_value(error.what());
    }
  };
  CHECK_NOTHROW(run_in_process(2, body));
  CHECK(in_time);
  CHECK(doctest::String(text.get().c_str()) == doctest::Contains("rank 1 failed in somewhere: an error of its own"));
}

TEST_CASE("a mismatch ends every rank of the group with an error that lists what each passed") {
  for (const int64_t size : {2, 3, 8}) {
    const auto run = [size] {
      run_in_process(size, [size](const WorldPtr& world) {
        const DeviceMesh mesh = line(world);
        const Checked off(mesh, false);  // so that the group's own error is thrown
        const at::Tensor mine = world->rank() == size - 1 ? at::ones({3}) : at::ones({2});
        CHECK_THROWS_WITH_AS(all_reduce(mine, mesh, 0, ReduceOp::kSum),
                             doctest::Contains("all_reduce sum of Float (3)"), MismatchError);
        check_refused<std::runtime_error>([&] { barrier(mesh, 0); }, "the job has failed");
        throw std::runtime_error("as it should");
      });
    };
    check_refused<std::runtime_error>(run, "as it should");
  }
}

TEST_CASE("the world's time limit ends a collective to which a rank does not come, and says which") {
  const auto run = [] {
    run_in_process(3,
                   [](const WorldPtr& world) {
                     const DeviceMesh mesh = line(world);
                     const Checked off(mesh, false);  // so that the group's own error is thrown
                     if (world->rank() == 1) return std::this_thread::sleep_for(std::chrono::seconds(3));
                     all_reduce(at::ones({2}), mesh, 0, ReduceOp::kSum);
                   },
                   {.timeout = std::chrono::seconds(1)});
  };
  check_refused<std::runtime_error>(run,
                                    "timed out after 1000 ms in all_reduce sum of Float (2): ranks [1] did not come");
}

TEST_CASE("a rank whose body returns while others wait for it is named") {
  const auto start = std::chrono::steady_clock::now();
  const auto run = [](int64_t leaver) {
    run_in_process(3, [leaver](const WorldPtr& world) {
      if (world->rank() == leaver) return;
      barrier(line(world), 0);
    });
  };
  check_refused<std::runtime_error>(
      [&] { run(1); }, "a peer was lost: ranks [1] have left the group: the body of such a rank has returned");
  check_refused<std::runtime_error>([&] { run(0); }, "ranks [0] have left the group");
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
}

TEST_CASE("where two threads of one rank communicate at once, every rank gets an error") {
  run_in_process(2, [](const WorldPtr& world) {
    const DeviceMesh mesh = line(world);
    barrier(mesh, 0);
    if (world->rank() == 0) {
      const World::Exclusive inside(*world);
      std::thread([&] {
        check_refused<std::runtime_error>([&] { all_reduce(at::ones({2}), mesh, 0, ReduceOp::kSum); },
                                          "rank 0: two threads communicate at once");
      }).join();
    }
    check_refused<std::runtime_error>([&] { all_reduce(at::ones({2}), mesh, 0, ReduceOp::kSum); },
                                      "two threads communicate at once");
  });
}

TEST_CASE("worlds for threads of one's own, several runs at once, and a run in a run") {
  const std::vector<WorldPtr> worlds = make_in_process_worlds(2);
  const auto sum_on = [](const WorldPtr& world) {
    return all_reduce(at::full({1}, world->rank() + 1), line(world), 0, ReduceOp::kSum).item<float>();
  };
  {
    std::jthread other([&] { CHECK(sum_on(worlds[1]) == 3); });
    CHECK(sum_on(worlds[0]) == 3);
  }
  std::vector<std::jthread> runs;
  for (int i = 0; i < 3; ++i) {
    runs.emplace_back([&] {
      run_in_process(3, [&](const WorldPtr& outer) {
        CHECK(sum_on(outer) == 6);
        run_in_process(2, [&](const WorldPtr& inner) { CHECK(sum_on(inner) == 3); });
        CHECK(sum_on(outer) == 6);
      });
    });
  }
}

TEST_CASE("a world that is gone or retired has left its groups") {
  for (const bool retired : {false, true}) {
    CAPTURE(retired);
    std::vector<WorldPtr> worlds = make_in_process_worlds(2);
    if (retired) {
      worlds[1]->retire();
    } else {
      worlds[1].reset();
    }
    check_refused<std::runtime_error>([&] { barrier(line(worlds[0]), 0); }, "ranks [1] have left the group");
  }
}

TEST_CASE("hundreds of runs of eight ranks take seconds, small collectives tens of microseconds") {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 100; ++i) {
    run_in_process(8, [](const WorldPtr& world) { barrier(line(world), 0); });
  }
  const auto runs = std::chrono::steady_clock::now() - start;
  std::chrono::nanoseconds took{};
  run_in_process(8, [&](const WorldPtr& world) {
    const DeviceMesh mesh = line(world);
    barrier(mesh, 0);
    const auto begin = std::chrono::steady_clock::now();
    const at::Tensor mine = at::ones({16});
    for (int i = 0; i < 2000; ++i) all_reduce(mine, mesh, 0, ReduceOp::kSum);
    if (world->rank() == 0) took = std::chrono::steady_clock::now() - begin;
  });
  MESSAGE("a run: ", std::chrono::duration<double, std::micro>(runs).count() / 100,
          " us; a collective: ", std::chrono::duration<double, std::micro>(took).count() / 2000, " us");
  // This is ten times the usual time, for slow machines and sanitizers.
  CHECK(runs < std::chrono::seconds(30));
  CHECK(took < std::chrono::seconds(20));
}
