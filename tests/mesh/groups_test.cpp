// Tests groups that the caller made, and groups with options of their own.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tessera/mesh/backends/backend_group.h"
#include "tessera/mesh/backends/orderly_end.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/harness/refused.h"

using namespace tessera;
using namespace std::chrono_literals;
using tessera::testing::check_refused;
using tessera::testing::world;
using Cause = WaitError::Cause;
using Group = c10::intrusive_ptr<c10d::Backend>;
using Ints = std::vector<int64_t>;

namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Returns what others have written only after a delay, so that its rank connects later than they do; meanwhile it looks
// whether one of them has its group already.
class LateStore : public c10d::PrefixStore {
 public:
  using PrefixStore::PrefixStore;
  std::vector<uint8_t> get(const std::string& key) override {
    std::this_thread::sleep_for(200ms);
    one_is_done_ = one_is_done_ || check({kDone});
    return PrefixStore::get(key);
  }
  bool one_is_done() const { return one_is_done_; }

  static constexpr const char* kDone = "done";

 private:
  bool one_is_done_ = false;
};

// Notes how it is ended. What it throws from drain() has the text `error`, if that is not empty.
class NotedEnd : public c10d::Backend, public OrderlyEnd {
 public:
  NotedEnd(int rank, int size, std::string& note, std::string error = {})
      : Backend(rank, size), note_(note), error_(std::move(error)) {}
  const std::string getBackendName() const override { return "noted"; }
  void drain() override {
    note_ += "drain ";
    if (!error_.empty()) throw std::runtime_error(error_);
  }
  void end() override { note_ += "end "; }

 private:
  std::string& note_;
  const std::string error_;
};

// Has a barrier that calls a function and waits for nothing, and a limit of a minute.
class CallingBarrier : public c10d::Backend {
 public:
  CallingBarrier(int rank, int size, std::function<void()> call) : Backend(rank, size), call_(std::move(call)) {}
  const std::string getBackendName() const override { return "calling"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return c10::make_intrusive<Options>("calling", 1min); }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    call_();
    return nullptr;
  }

 private:
  const std::function<void()> call_;
};

// Makes another world of the same ranks, whose groups come from `make_group`.
std::shared_ptr<World> own_world(const std::string& place, MakeGroup make_group,
                                 std::chrono::milliseconds timeout = std::chrono::minutes(5)) {
  WorldOptions options;
  options.rank = options.local_rank = world()->rank();
  options.size = options.local_size = world()->size();
  options.store = c10::make_intrusive<c10d::PrefixStore>(place, world()->store());
  options.make_group = std::move(make_group);
  options.timeout = timeout;
  return World::create(std::move(options));
}

// Makes a world whose groups call `in_barrier`. Their backend has aborted them when `aborted` has a value.
std::shared_ptr<World> aborting_world(const std::string& place, const std::optional<Cause>& aborted,
                                      const std::function<void()>& in_barrier) {
  return own_world(place, [&aborted, in_barrier](const GroupRequest& request) {
    return BackendGroup{.backend = c10::make_intrusive<CallingBarrier>(request.rank, request.size, in_barrier),
                        .close = [] {},
                        .aborted = [&aborted] { return aborted; }};
  });
}

// Returns what is noted of the groups of a world that ends after `body`. Their drain() throws `error`.
std::string end_of_world(const std::string& place, const std::function<void(World&)>& body,
                         const std::string& error = {}) {
  std::string note;
  {
    const std::shared_ptr<World> own = own_world(place, [&](const GroupRequest& request) {
      return BackendGroup{c10::make_intrusive<NotedEnd>(request.rank, request.size, note, error),
                          [&note] { note += "close "; }};
    });
    init_device_mesh("cpu", {world()->size()}, {"tp"}, own).group("tp");
    body(*own);
  }
  return note;
}

// Calls check_alive, which throws once a rank has failed, for at most half a minute.
void check_alive_for_a_while(const World& own) {
  for (int i = 0; i < 3000; ++i) {
    own.check_alive();
    std::this_thread::sleep_for(10ms);
  }
}

// Returns a group of all ranks that notes how it is ended.
Group noted(std::string& note) { return c10::make_intrusive<NotedEnd>(world()->rank(), world()->size(), note); }

// Makes a Gloo group of `ranks`, as a program would make its own.
Group own_group(const Ints& ranks, const StorePtr& store) {
  const auto place = std::find(ranks.begin(), ranks.end(), world()->rank()) - ranks.begin();
  return make_gloo_group({.store = store,
                          .rank = static_cast<int>(place),
                          .size = static_cast<int>(ranks.size()),
                          .timeout = 60s,
                          .one_host = true})
      .backend;
}

Group own_group(const Ints& ranks) {
  const std::string prefix = fmt::format("own/{}", fmt::join(ranks, "-"));
  return own_group(ranks, c10::make_intrusive<c10d::PrefixStore>(prefix, world()->store()));
}

Group telling(Group group, const std::vector<uint64_t>& ranks) {
  group->getBackendOptions()->global_ranks_in_group = ranks;
  return group;
}

int64_t sum_of_ranks(const DeviceMesh& mesh, int64_t mesh_dim) {
  return all_reduce(at::scalar_tensor(world()->rank(), at::kLong), mesh, mesh_dim, ReduceOp::kSum).item<int64_t>();
}

}  // namespace

TESSERA_RANKS_TEST_CASE("from_group: a group of the whole world is a mesh of one dimension over it", {2, 3}) {
  const int64_t n = world()->size();
  Ints all;
  for (int64_t rank = 0; rank < n; ++rank) all.push_back(rank);
  const Group group = own_group(all);
  const DeviceMesh mesh = DeviceMesh::from_group(group, "cpu", "tp", world());
  CHECK(mesh == init_device_mesh("cpu", {n}, {"tp"}, world()));
  CHECK(mesh.group("tp") == group);
  CHECK(sum_of_ranks(mesh, 0) == n * (n - 1) / 2);
  CHECK(world()->group_count() == 1);
  CHECK(DeviceMesh::from_group(group, "cpu", "", world()).mesh() == Mesh({n}));
}

TESSERA_RANKS_TEST_CASE("from_group: a group that tells its ranks is a mesh over them", {4}) {
  const bool odd = world()->rank() % 2 == 1;
  const Group group = odd ? telling(own_group({3, 1}), {3, 1}) : telling(own_group({0, 2}), {0, 2});
  const DeviceMesh mesh = DeviceMesh::from_group(group, "cpu", "tp", world());
  CHECK(mesh.mesh() == Mesh({2}, {"tp"}, odd ? Ints{3, 1} : Ints{0, 2}));
  CHECK(sum_of_ranks(mesh, 0) == (odd ? 4 : 2));
  CHECK(world()->group_count() == 1);
}

TESSERA_RANKS_TEST_CASE("from_group: groups for each mesh dimension carry its collectives, on slices too", {4}) {
  const Mesh shape({2, 2}, {"dp", "tp"});
  const int64_t rank = world()->rank();
  const Group dp = own_group(rank % 2 == 0 ? Ints{0, 2} : Ints{1, 3});
  const Group tp = own_group(rank < 2 ? Ints{0, 1} : Ints{2, 3});
  const DeviceMesh mesh = DeviceMesh::from_group({dp, tp}, "cpu", shape, world());
  CHECK(mesh.group("dp") == dp);
  CHECK(mesh["tp"].group(0) == tp);
  CHECK(sum_of_ranks(mesh, 0) == (rank % 2 == 0 ? 2 : 4));
  CHECK(sum_of_ranks(mesh["tp"], 0) == (rank < 2 ? 1 : 5));
  CHECK(world()->group_count() == 2);
  // The caller did not give a group for this mesh.
  CHECK(sum_of_ranks(mesh.merged({0, 1}), 0) == 6);
  CHECK(world()->group_count() == 3);
}

TESSERA_RANKS_TEST_CASE("from_group: a caller's group takes the place of one that the world made", {2}) {
  const DeviceMesh before = init_device_mesh("cpu", {2}, {"tp"}, world());
  const DeviceMesh other = init_device_mesh("cpu", {2, 1}, {"a", "b"}, world());
  CHECK(sum_of_ranks(before, 0) == 1);
  CHECK(sum_of_ranks(other, 0) == 1);
  const Group group = own_group({0, 1});
  CHECK(before.group(0) != group);
  const c10::weak_intrusive_ptr<c10d::Backend> replaced(before.group(0));
  DeviceMesh::from_group(group, "cpu", "tp", world());
  CHECK(replaced.expired());  // no mesh that used it keeps it
  CHECK(before.group(0) == group);
  CHECK(other.group(0) == group);
  CHECK(sum_of_ranks(before, 0) == 1);
  CHECK(sum_of_ranks(other, 0) == 1);
  CHECK(world()->group_count() == 1);
}

TESSERA_RANKS_TEST_CASE("from_group: what does not fit is refused, with the values seen", {4}) {
  const int64_t rank = world()->rank();
  const bool left = rank < 2;
  const Group tp = own_group(left ? Ints{0, 1} : Ints{2, 3});
  const auto one = [](const Group& group, const std::string& device = "cpu") {
    return [=] { DeviceMesh::from_group(group, device, "tp", world()); };
  };
  const auto several = [](const std::vector<Group>& groups, const Mesh& mesh) {
    return [=] { DeviceMesh::from_group(groups, "cpu", mesh, world()); };
  };
  check_refused(one(nullptr), "from_group: the group is null");
  check_refused(one(tp),
                "the group of 2 ranks does not tell which of the world's 4 they are; set global_ranks_in_group");
  check_refused(one(telling(tp, {0, 9})), "names rank 9, outside the world of 4 ranks");
  check_refused(one(telling(tp, {0, 1, 2, 3})),
                "the group for mesh dimension tp has 2 ranks, but mesh {tp: 4} on cpu has 4 there");
  check_refused(one(telling(tp, {0, 1}), "tpu"), "from_group: device 'tpu' is not supported");
  const Ints mine = left ? Ints{0, 1} : Ints{2, 3}, other = left ? Ints{2, 3} : Ints{0, 1};
  check_refused(several({tp, tp}, Mesh({2}, {"tp"}, mine)),
                "from_group: 2 groups for the 1 mesh dimensions of mesh {tp: 2}");
  check_refused(several({nullptr}, Mesh({2}, {"tp"}, mine)), "the group for mesh dimension tp is null");
  check_refused(several({tp}, Mesh({2}, {"tp"}, other)),
                fmt::format("from_group: rank {} is outside mesh {{tp: 2}}", rank));
  check_refused(several({telling(tp, {})}, Mesh({2}, {"tp"}, {mine[1], mine[0]})),
                fmt::format("rank {} has position {} in the group for mesh dimension tp and coordinate {} there", rank,
                            rank % 2, 1 - rank % 2));
  check_refused(several({telling(tp, {0, 3})}, Mesh({2}, {"tp"}, mine)),
                fmt::format("the group for mesh dimension tp is over ranks [0, 3], but mesh {} on cpu has [{}] there",
                            Mesh({2}, {"tp"}, mine).to_string(), fmt::join(mine, ", ")));
  check_refused([&] { world()->adopt(mine, c10::kCPU, nullptr); }, "it is null");
  check_refused([&] { world()->adopt(other, c10::kCPU, tp); }, fmt::format("rank {} is not among them", rank));
  check_refused(
      [&] {
        world()->adopt({mine[1], mine[0]}, c10::kCPU, tp);
      },
      fmt::format("rank {} has position {} of 2 in it; list the ranks in the group's own order", rank, rank % 2));
  CHECK(world()->group_count() == 0);
}

TESSERA_RANKS_TEST_CASE("a failure elsewhere ends a collective of a group that the caller made", {2}) {
  const DeviceMesh mesh = DeviceMesh::from_group(own_group({0, 1}), "cpu", "tp", world());
  CHECK(sum_of_ranks(mesh, 0) == 1);
  const auto start = std::chrono::steady_clock::now();
  if (world()->rank() == 0) {
    world()->fail("loss", "not a number");
  } else {
    check_refused<std::runtime_error>([&] { sum_of_ranks(mesh, 0); }, "rank 0 failed in loss: not a number");
  }
  CHECK(std::chrono::steady_clock::now() - start < 10s);
}

TESSERA_RANKS_TEST_CASE("a world that ends without a failure ends its groups in order", {2}) {
  CHECK(end_of_world("in order", [](World&) {}) == "drain end ");
  const DeviceMesh all = init_device_mesh("cpu", {2}, {"tp"}, world());
  const auto fail = [&](World& own) {
    sum_of_ranks(all, 0);  // both have made their group
    own.fail("loss", "not a number");
  };
  CHECK(end_of_world("failed", fail) == "close ");
}

TESSERA_RANKS_TEST_CASE("a process that a rank forks may end its copy of the world, and the rank goes on", {2}) {
  std::shared_ptr<World> own = own_world("forked", {});
  const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, own);
  CHECK(all_reduce(at::ones({1}), mesh, 0, ReduceOp::kSum).item<float>() == 2);
  const pid_t child = ::fork();
  if (child == 0) {
    own->~World();
    ::_exit(0);
  }
  int status = -1;
  for (int tenths = 0; tenths < 100 && ::waitpid(child, &status, WNOHANG) == 0; ++tenths) ::usleep(100'000);
  CHECK(status == 0);
  if (status != 0) ::kill(child, SIGKILL);
  CHECK(all_reduce(at::ones({1}), mesh, 0, ReduceOp::kSum).item<float>() == 2);
}

TESSERA_RANKS_TEST_CASE("a call of the backend that outlasts every limit fails the job, and is ended", {2}) {
  std::promise<void> closed;
  std::once_flag once;
  const auto wait_until_closed = [&] {
    closed.get_future().wait();
    throw std::runtime_error("aborted");
  };
  const std::shared_ptr<World> own = own_world(
      "late call",
      [&](const GroupRequest& request) {
        const auto call = world()->rank() == 0 ? std::function<void()>(wait_until_closed) : [] {};
        return BackendGroup{.backend = c10::make_intrusive<CallingBarrier>(request.rank, request.size, call),
                            .close = [&] { std::call_once(once, [&] { closed.set_value(); }); },
                            .closes_while_busy = true};
      },
      500ms);
  const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, own);
  // Meanwhile a call that lasts as long, in a group of the caller's with a longer limit, does not fail its world.
  const std::shared_ptr<World> patient = own_world("patient", {}, 500ms);
  const int here = static_cast<int>(world()->rank());
  const auto take_long = [&] { std::this_thread::sleep_for(here == 0 ? 9500ms : 0ms); };
  const DeviceMesh given =
      DeviceMesh::from_group(c10::make_intrusive<CallingBarrier>(here, 2, take_long), "cpu", "tp", patient);
  std::future<void> long_call = std::async(std::launch::async, [&] {
    barrier(given, 0);
    patient->check_alive();
  });
  const auto start = std::chrono::steady_clock::now();
  if (world()->rank() == 0) {
    check_refused<std::runtime_error>([&] { barrier(mesh, 0); },
                                      "rank 0 waited in vain in a collective: the backend has not returned within its "
                                      "limit of 500 ms");
  } else {
    barrier(mesh, 0);
    check_refused<std::runtime_error>([&] { check_alive_for_a_while(*own); }, "rank 0 waited in vain in a collective");
  }
  const auto taken = std::chrono::steady_clock::now() - start;
  CHECK(taken > 8s);
  CHECK(taken < 500ms + 10s);  // docs/reliability.md promises it
  CHECK_NOTHROW(long_call.get());
}

TESSERA_RANKS_TEST_CASE("an error of a rank's own device at the end of its world fails the job", {2}) {
  const std::string text = "CUDA error: device-side assert triggered";
  const DeviceMesh all = init_device_mesh("cpu", {2}, {"tp"}, world());
  const auto both_have_groups = [&](World&) { sum_of_ranks(all, 0); };
  const auto learns_of_it = [&](World& own) {
    sum_of_ranks(all, 0);
    check_refused<std::runtime_error>([&] { check_alive_for_a_while(own); },
                                      "rank 0 failed in the end of its world: " + text);
  };
  if (world()->rank() == 0) {
    CHECK(end_of_world("own error", both_have_groups, text) == "drain close ");
  } else {
    CHECK(end_of_world("own error", learns_of_it) == "close ");
  }
  CHECK(end_of_world("error of a peer", both_have_groups, "Connection closed by peer") == "drain end ");
}

TESSERA_RANKS_TEST_CASE("a group ends when another one takes its place, and not when it is adopted itself", {2}) {
  const Ints everyone = {0, 1};
  std::string other;
  const auto replace = [&](World& own) {
    const Group first = own.group(everyone, c10::kCPU);
    own.adopt(everyone, c10::kCPU, first);
    CHECK(own.group(everyone, c10::kCPU) == first);
    own.adopt(everyone, c10::kCPU, noted(other));
    CHECK(own.group(everyone, c10::kCPU) != first);
    CHECK(other.empty());
  };
  CHECK(end_of_world("replaced", replace) == "drain end ");
  CHECK(other == "drain end ");
}

TESSERA_RANKS_TEST_CASE("a group that its backend has aborted fails the job, and what comes next says why", {2}) {
  struct Row {
    std::string place;
    Cause cause;
    std::string text;
  };
  const std::vector<Row> rows = {
      {"timeout", Cause::kTimeout,
       "waited in vain in a collective on a GPU: NCCL has aborted the group's collectives after its time limit"},
      {"loss", Cause::kLost, "a peer was lost: which one is not known"},
  };
  const DeviceMesh all = init_device_mesh("cpu", {2}, {"tp"}, world());
  for (const Row& row : rows) {
    CAPTURE(row.place);
    std::optional<Cause> aborted;
    const std::shared_ptr<World> own = aborting_world("aborted/" + row.place, aborted, [] {});
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, own);
    CHECK_NOTHROW(barrier(mesh, 0));
    CHECK_NOTHROW(own->check_alive());
    barrier(all, 0);
    aborted = row.cause;
    check_refused<std::runtime_error>([&] { own->check_alive(); }, row.text);
    check_refused<std::runtime_error>([&] { barrier(mesh, 0); }, row.text);
    barrier(all, 0);  // no rank leaves its store while the other looks for a reason
  }
}

TESSERA_RANKS_TEST_CASE("a group whose backend does not say whether it has aborted it is taken as it is", {2}) {
  const std::shared_ptr<World> own = own_world("says nothing", [](const GroupRequest& request) {
    return BackendGroup{c10::make_intrusive<CallingBarrier>(request.rank, request.size, [] {}), [] {}};
  });
  CHECK_NOTHROW(barrier(init_device_mesh("cpu", {2}, {"tp"}, own), 0));
  CHECK_NOTHROW(own->check_alive());
}

TESSERA_RANKS_TEST_CASE("a barrier that its backend aborts throws, also where the backend's own does not", {2}) {
  const DeviceMesh all = init_device_mesh("cpu", {2}, {"tp"}, world());
  for (const bool throws : {false, true}) {
    CAPTURE(throws);
    std::optional<Cause> aborted;
    const auto in_barrier = [&aborted, throws] {
      aborted = Cause::kTimeout;
      if (throws) throw std::runtime_error("the communicator was aborted");
    };
    const std::string place = throws ? "aborted/with an error" : "aborted/without an error";
    const std::shared_ptr<World> own = aborting_world(place, aborted, in_barrier);
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, own);
    mesh.group("tp");
    barrier(all, 0);  // both have made their group
    // Where the backend throws, the collective and the backend's text are named.
    const std::string text = throws ? "waited in vain in barrier on mesh dimension tp of {tp: 2} on cpu: the "
                                      "communicator was aborted"
                                    : "waited in vain in a collective on a GPU: NCCL has aborted the group's";
    check_refused<std::runtime_error>([&] { barrier(mesh, 0); }, text);
    barrier(all, 0);
  }
}

TESSERA_RANKS_TEST_CASE("groups that close while their rank is busy are closed all at once", {2}) {
  std::string note;
  std::atomic<int> begun = 0;
  std::atomic<bool> late = false;
  const auto close = [&] {
    ++begun;
    const auto deadline = std::chrono::steady_clock::now() + 5s;
    while (begun < 2 && !late) {
      if (std::chrono::steady_clock::now() > deadline) late = true;
      std::this_thread::sleep_for(1ms);
    }
  };
  const std::shared_ptr<World> own = own_world("closed at once", [&](const GroupRequest&) {
    return BackendGroup{.backend = noted(note), .close = close, .closes_while_busy = true};
  });
  own->group({0, 1}, c10::kCPU);
  own->group({0, 1}, c10::kCPU, {.timeout = 7s});
  CHECK(own->group_count() == 2);
  barrier(init_device_mesh("cpu", {2}, {"tp"}, world()), 0);  // both have made their groups
  if (world()->rank() == 0) {
    own->fail("loss", "not a number");
    CHECK(begun.load() >= 2);
  }
  CHECK_FALSE(late.load());
}

// A rank that had its group before the others connected might leave, and they would see it as lost.
TESSERA_RANKS_TEST_CASE("no rank has its group before each has connected", {2, 3}) {
  Ints everyone(static_cast<std::size_t>(world()->size()));
  std::iota(everyone.begin(), everyone.end(), int64_t{0});
  for (const int64_t late : everyone) {
    CAPTURE(late);
    const auto store = c10::make_intrusive<LateStore>(fmt::format("late/{}", late), world()->store());
    if (world()->rank() == late) {
      own_group(everyone, store);
      CHECK_FALSE(store->one_is_done());
    } else {
      own_group(everyone, c10::make_intrusive<c10d::PrefixStore>(fmt::format("late/{}", late), world()->store()));
      store->set(LateStore::kDone, std::string("1"));
    }
  }
}

TESSERA_RANKS_TEST_CASE("a peer that is gone does not end the process by SIGPIPE; a program's own handler stays", {2}) {
  const auto handler = [] {
    struct sigaction now {};
    REQUIRE(sigaction(SIGPIPE, nullptr, &now) == 0);
    return now.sa_handler;
  };
  std::signal(SIGPIPE, SIG_DFL);
  own_group({0, 1});
  CHECK((handler() == SIG_IGN));
  const auto own = [](int) {};
  std::signal(SIGPIPE, own);
  const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, world());
  CHECK(sum_of_ranks(mesh, 0) == 1);
  CHECK((handler() == static_cast<void (*)(int)>(own)));
}

TESSERA_RANKS_TEST_CASE("each mesh dimension's groups have its options", {4}) {
  const DeviceMesh mesh =
      init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world(), {{"tp", {.timeout = 7s, .backend = "gloo"}}});
  const DeviceMesh plain = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world());
  CHECK(mesh.group("tp")->getBackendOptions()->timeout == 7s);
  CHECK(mesh.group("dp")->getBackendOptions()->timeout == world()->timeout());
  CHECK(plain.group("tp")->getBackendOptions()->timeout == world()->timeout());
  CHECK(mesh.group("dp") == plain.group("dp"));
  CHECK(world()->group_count() == 3);
  CHECK(sum_of_ranks(mesh, 1) == (world()->rank() < 2 ? 1 : 5));
  CHECK(sum_of_ranks(plain, 1) == (world()->rank() < 2 ? 1 : 5));
}

TESSERA_RANKS_TEST_CASE("a mesh dimension's own timeout ends its collective, long before the world's", {2}) {
  const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, world(), {{"tp", {.timeout = 3s}}});
  REQUIRE(world()->timeout() >= 30s);
  CHECK(sum_of_ranks(mesh, 0) == 1);  // it connects the ranks, within the same limit
  const auto start = std::chrono::steady_clock::now();
  if (world()->rank() == 0) {
    check_refused<std::runtime_error>([&] { sum_of_ranks(mesh, 0); }, "rank 0 waited in vain in ");
    CHECK(std::chrono::steady_clock::now() - start >= 2500ms);
  } else {
    std::this_thread::sleep_for(8s);  // never arrives
  }
  CHECK(std::chrono::steady_clock::now() - start < 20s);
}
