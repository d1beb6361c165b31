#include "tessera/mesh/world.h"

#include <barrier>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/mesh/backends/backend_group.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/failure.h"
#include "tessera/tests/harness/refused.h"

using namespace tessera;
using tessera::testing::check_refused;

namespace {

WorldOptions options_of(int64_t rank, int64_t size) {
  WorldOptions options;
  options.rank = rank;
  options.size = size;
  return options;
}

}  // namespace

TEST_CASE("a world of one needs no store") {
  const auto world = World::create({});
  CHECK(world->rank() == 0);
  CHECK(world->size() == 1);
  CHECK(world->timeout() == std::chrono::minutes(5));
  CHECK_FALSE(world->is_fake());
  CHECK(world->id() != World::create({})->id());
}

TEST_CASE("a process that no launcher started is a world of one, the same while anyone holds it") {
  const auto world = World::from_environment();
  CHECK(world->size() == 1);
  CHECK(World::from_environment() == world);
}

TEST_CASE("where rank 0 cannot say how many ranks a host has, the others read why") {
  // Has no space for a value, but for failures.
  class FullStore : public c10d::HashStore {
   public:
    void set(const std::string& key, const std::vector<uint8_t>& value) override {
      if (key.find("local_size") != std::string::npos) throw std::runtime_error("No space left on device");
      HashStore::set(key, value);
    }
  };
  WorldOptions first = options_of(0, 2), second = options_of(1, 2);
  first.store = second.store = c10::make_intrusive<FullStore>();
  const auto other = World::create(second);
  check_refused<std::runtime_error>([&] { World::create(first); },
                                    "rank 0 failed in saying how many ranks a host has: No space left on device");
  check_refused<std::runtime_error>([&] { other->ranks_per_host(); }, "No space left on device");
}

TEST_CASE("options that fit no world are refused") {
  check_refused([] { World::create(options_of(2, 2)); }, "World: rank 2 is outside [0, 2)");
  check_refused([] { World::create(options_of(-1, 2)); }, "World: rank -1 is outside [0, 2)");
  check_refused([] { World::create(options_of(0, 0)); }, "World: rank 0 is outside [0, 0)");
  check_refused([] { World::create(options_of(0, 2)); },
                "2 ranks need a store to find each other; set WorldOptions::store");
  WorldOptions no_time = options_of(0, 1);
  no_time.timeout = std::chrono::milliseconds(0);
  check_refused([&] { World::create(no_time); }, "a timeout of 0 ms is not positive");
  no_time.timeout = std::chrono::milliseconds::max();
  check_refused([&] { World::create(no_time); }, "ms is too long; give at most 1000000000 ms");
  WorldOptions local = options_of(0, 1);
  local.local_size = 2;
  check_refused([&] { World::create(local); }, "local rank 0 of 2 does not fit a world of 1");
  local = options_of(3, 4);
  local.local_rank = 3;
  check_refused([&] { World::create(local); }, "local rank 3 of 1 does not fit a world of 4; set");
}

TEST_CASE("groups that cannot be made are refused") {
  const auto world = World::fake(1, 4);
  check_refused([&] { world->group({0, 2}, c10::kCPU); }, "group of ranks [0, 2]: rank 1 is not among them");
  check_refused([&] { world->group({1, 4}, c10::kCPU); }, "rank 4 is outside the world of 4");
  check_refused([&] { world->group({2, 1, 2}, c10::kCPU); }, "group of ranks [2, 1, 2]: rank 2 is listed twice");
  check_refused([&] { world->adopt({1, 1}, c10::kCPU, make_fake_group(0, 2).backend); }, "rank 1 is listed twice");
}

TEST_CASE("a fake world plans at any size: shapes are right, and collectives are counted") {
  const auto world = World::fake(4095, 4096);
  const DeviceMesh mesh = init_device_mesh("cpu", {64, 64}, {"dp", "tp"}, world);
  CHECK(mesh.coordinate() == std::vector<int64_t>{63, 63});
  CommCounter counter(mesh);
  CHECK(all_gather(at::ones({2}), mesh, 0).sizes() == at::IntArrayRef({64, 2}));
  CHECK(all_reduce(at::ones({2}), mesh, 1, ReduceOp::kAvg).sizes() == at::IntArrayRef({2}));
  CHECK(reduce_scatter(at::ones({64, 3}), mesh, 1, ReduceOp::kSum).sizes() == at::IntArrayRef({3}));
  CHECK(all_to_all(at::ones({64}), std::vector<int64_t>(64, 1), std::vector<int64_t>(64, 2), mesh, 0).numel() == 128);
  CHECK(broadcast(at::ones({5}), mesh, 0, 7).equal(at::zeros({5})));
  CHECK(broadcast(at::ones({5}), mesh, 0, 63).equal(at::ones({5})));
  CHECK(scatter(at::Tensor(), at::ones({5}), mesh, 0, 7).numel() == 5);
  barrier(mesh, 1);
  CHECK(counter.total() == 8);
  CHECK(mesh.group("tp")->getSize() == 64);
  CHECK(mesh.group("tp")->getRank() == 63);
  const DeviceMesh all = init_device_mesh("cpu", {4096}, {}, world);
  CHECK(all_gather(at::ones({1}), all, 0).numel() == 4096);
}

TEST_CASE("a fake world's group gathers into an output of the right size alone") {
  const auto group = World::fake(0, 2)->group({0, 1}, c10::kCPU);
  at::Tensor input = at::ones({2}), output = at::zeros({3}), whole = at::zeros({4});
  check_refused([&] { group->_allgather_base(output, input); }, "an input of 8 bytes does not fill an output of 12");
  group->_allgather_base(whole, input);
  CHECK(at::equal(whole, at::ones({4})));
  // Uneven pieces of the others are zeros, as pieces that it does not know are elsewhere.
  std::vector<at::Tensor> inputs = {input};
  std::vector<std::vector<at::Tensor>> uneven = {{at::full({2}, 7.0), at::full({1}, 7.0)}},
                                       even = {{at::zeros({2}), at::zeros({2})}};
  group->allgather(uneven, inputs);
  group->allgather(even, inputs);
  CHECK(at::equal(at::cat(uneven[0]), at::zeros({3})));
  CHECK(at::equal(at::cat(even[0]), at::ones({4})));
}

TEST_CASE("a collective that is waited for may hold the last reference to its world") {
  std::weak_ptr<World> world;
  const auto start = [&] {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, World::fake(0, 2));
    world = mesh.world_ptr();
    return start_all_reduce(at::ones({2}), mesh, 0, ReduceOp::kSum);
  };
  PendingCollective pending = start();
  CHECK_FALSE(world.expired());
  // AddressSanitizer would see a use of the world after its end.
  CHECK(at::equal(pending.wait(), at::ones({2})));
  CHECK(world.expired());
}

TEST_CASE("an observer sees collectives until its token dies, also after the world") {
  auto world = World::fake(0, 2);
  int seen = 0;
  CHECK_FALSE(world->observed());
  auto token = world->observe([&](const CollectiveRecord&) { ++seen; });
  CHECK(world->observed());
  world->record({});
  {
    const auto second = world->observe([&](const CollectiveRecord&) { seen += 10; });
    world->record({});
  }
  world->record({});
  CHECK(seen == 13);
  token.reset();
  CHECK_FALSE(world->observed());
  token = world->observe([](const CollectiveRecord&) {});
  world.reset();
  token.reset();
}

TEST_CASE("scopes nest: operator and path are those of the innermost that sets them") {
  const auto world = World::create({});
  CHECK(std::string(world->current_op()).empty());
  CHECK(world->current_path() == "-");
  const std::string path = "encoder.0";
  {
    const World::Scope outer(*world, "aten::mm", &path);
    {
      const World::Scope inner(*world, "redistribute");
      CHECK(std::string(world->current_op()) == "redistribute");
      CHECK(world->current_path() == "encoder.0");
    }
    CHECK(std::string(world->current_op()) == "aten::mm");
  }
  CHECK(world->current_path() == "-");
}

TEST_CASE("scopes are a thread's own: one that begins or ends elsewhere changes nothing here") {
  const auto world = World::fake(0, 2), other_world = World::fake(0, 2);
  const auto seen = [&] { return world->current_op() + (" " + world->current_path()); };
  std::string during, after;
  std::promise<void> entered, left;
  std::thread other;
  {
    const auto path = std::make_unique<std::string>("main.0");
    const World::Scope mine(*world, "aten::mm", path.get());
    other = std::thread([&] {
      const std::string theirs = "other.0";
      const World::Scope scope(*world, nullptr, &theirs);
      during = seen();
      entered.set_value();
      left.get_future().wait();
      after = seen();
    });
    entered.get_future().wait();
    CHECK(seen() == "aten::mm main.0");
    const World::Scope elsewhere(*other_world, "aten::add");
    CHECK(seen() == "aten::mm main.0");
  }
  CHECK(seen() == " -");
  left.set_value();
  other.join();
  CHECK(during == " other.0");
  CHECK(after == " other.0");
  CHECK(seen() == " -");  // and not what the other thread saw when it arrived, which is gone
}

TEST_CASE("collectives of two threads that take turns are each charged to their own scope") {
  const auto world = World::fake(0, 2);
  const DeviceMesh mesh = init_device_mesh("cpu", {2}, {}, world);
  std::vector<std::string> charged;
  const auto token =
      world->observe([&](const CollectiveRecord& record) { charged.push_back(record.op + " " + record.path); });
  const std::string first = "first", second = "second";
  std::barrier turn(2);
  std::thread other([&] {
    turn.arrive_and_wait();
    const World::Scope scope(*world, "aten::add", &second);
    turn.arrive_and_wait();
    turn.arrive_and_wait();
    barrier(mesh, 0);
  });
  const World::Scope scope(*world, "aten::mm", &first);
  turn.arrive_and_wait();
  turn.arrive_and_wait();
  barrier(mesh, 0);
  turn.arrive_and_wait();
  other.join();
  CHECK(charged == std::vector<std::string>{"aten::mm first", "aten::add second"});
}

TEST_CASE("a second thread that communicates at the same time gets an error") {
  const auto world = World::fake(0, 2);
  const DeviceMesh mesh = init_device_mesh("cpu", {2}, {}, world);
  const auto in_thread = [&](const std::function<void()>& body) { std::thread(body).join(); };
  {
    const World::Scope scope(*world, "aten::mm");
    const World::Exclusive first(*world);
    const World::Exclusive again(*world);  // the same thread may
    in_thread([&] {
      check_refused<std::runtime_error>([&] { barrier(mesh, 0); },
                                        "rank 0: two threads communicate at once, one of them in aten::mm");
      check_refused<std::runtime_error>([&] { world->group({0, 1}, c10::kCPU); }, "two threads communicate at once");
    });
  }
}

TEST_CASE("two threads may communicate one after the other") {
  const auto world = World::fake(0, 2);
  const DeviceMesh mesh = init_device_mesh("cpu", {2}, {}, world);
  { const World::Exclusive first(*world); }
  std::thread([&] { CHECK_NOTHROW(barrier(mesh, 0)); }).join();
  CHECK_NOTHROW(barrier(mesh, 0));
}

TEST_CASE("an error in a callback of a world without peers is thrown on and ends nothing") {
  const auto world = World::create({});
  check_refused<std::out_of_range>([&] { world->guard("hook", [] { throw std::out_of_range("index 7"); }); },
                                   "index 7");
  CHECK_NOTHROW(world->check_alive());
  int runs = 0;
  world->guard("hook", [&] { ++runs; });
  CHECK(runs == 1);
}

TEST_CASE("a failed world throws the same text for every later collective") {
  WorldOptions options = options_of(1, 2);
  options.store = c10::make_intrusive<c10d::HashStore>();
  const auto world = World::create(options);
  const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, world);
  CHECK_THROWS_AS(world->guard("loss callback", [] { throw 7; }), int);
  const char* const text =
      "rank 1: the job has failed: rank 1 failed in loss callback: an exception that is not a std::exception";
  check_refused<std::runtime_error>([&] { barrier(mesh, 0); }, text);
  check_refused<std::runtime_error>([&] { all_reduce(at::ones({1}), mesh, 0, ReduceOp::kSum); }, text);
  check_refused<std::runtime_error>([&] { mesh.group(0); }, text);
  // The first failure is kept.
  world->fail("elsewhere", "another");
  check_refused<std::runtime_error>([&] { world->check_alive(); }, text);
  const auto record = decode_failure(options.store->get_to_str("tessera/failure"));
  CHECK(record == Failure{Failure::Kind::kError, 1, "loss callback", "an exception that is not a std::exception"});
}

TEST_CASE("a rank that gets no memory says so, and takes no peer for lost") {
  WorldOptions options = options_of(1, 2);
  options.store = c10::make_intrusive<c10d::HashStore>();
  options.make_group = [](const GroupRequest&) -> BackendGroup { throw std::bad_array_new_length(); };
  const auto world = World::create(options);
  const std::string failed = "rank 1 failed in making a process group: std::bad_array_new_length";
  check_refused<std::runtime_error>([&] { world->group({0, 1}, c10::kCPU); }, failed);
  CHECK(decode_failure(options.store->get_to_str("tessera/failure"))->kind == Failure::Kind::kError);
  CHECK(is_own_error(std::bad_alloc()));
  CHECK(is_own_error("Caught in a backend: std::bad_alloc"));
  CHECK(is_own_error("NCCL error: unhandled cuda error: Cuda failure 2 'out of memory'"));
  CHECK_FALSE(is_own_error(std::runtime_error("Connection closed by peer")));
}

TEST_CASE("a group that a user's function makes has a backend and a way to close it") {
  WorldOptions options = options_of(0, 1);
  const auto backend = make_fake_group(0, 1).backend;
  const auto refused = [&](const BackendGroup& made, const char* text) {
    options.make_group = [&](const GroupRequest&) { return made; };
    const auto world = World::create(options);
    CHECK_THROWS_WITH(world->group({0}, c10::kCPU), doctest::Contains(text));
  };
  refused({.backend = backend, .close = {}}, "without a close function");
  refused({.backend = {}, .close = [] {}}, "without a backend");
}

TEST_CASE("how many ranks a host has: a rank that asks waits until the world's limit, and names rank 0") {
  WorldOptions options = options_of(1, 2);
  options.store = c10::make_intrusive<c10d::HashStore>();
  options.store->setTimeout(std::chrono::seconds(20));
  options.timeout = std::chrono::milliseconds(300);
  const auto world = World::create(options);
  const auto start = std::chrono::steady_clock::now();
  check_refused<std::runtime_error>(
      [&] { world->ranks_per_host(); },
      "rank 1 waited in vain in asking rank 0 how many ranks a host has: timed out after 300 ms waiting for the other "
      "ranks to join (keys tessera/local_size); start every rank, or raise TESSERA_TIMEOUT; ranks [0] do not answer");
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::milliseconds(300 + 2000));
  CHECK(decode_failure(options.store->get_to_str("tessera/failure"))->kind == Failure::Kind::kTimeout);
  CHECK_THROWS_AS(world->check_alive(), std::runtime_error);
}

TEST_CASE("a record of a failure survives the store, whatever is in its text") {
  for (const std::string text : {"", "plain", "two\nlines 3 4", "  spaces  ", "12 34"}) {
    const Failure failure{Failure::Kind::kLost, 7, "in " + text, text};
    CHECK(decode_failure(encode(failure)) == failure);
  }
  for (const char* text : {"", "x", "0", "0 1", "9 1 0 ", "0 1 99 short", "0 1 -5 x"})
    CHECK(decode_failure(text) == std::nullopt);
}
