// Is a rank of a job in which something fails, for failure_test; the first argument says what, the second which rank
// fails (the last one, if it is not given). A rank that gets an error prints "error: TEXT"; the rank that fails prints
// "fault" just before.
#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/environment.h"
#include "tessera/mesh/store.h"

using namespace tessera;

namespace {

bool stops_in_mpi = false;

}  // namespace

// MPI lets a program put a function in the place of one of its own. In a build without MPI nobody calls this one.
extern "C" __attribute__((weak)) int PMPI_Finalize();
extern "C" int MPI_Finalize() {
  if (stops_in_mpi) std::raise(SIGSTOP);
  return PMPI_Finalize();
}

namespace {

void say(const std::string& text) {
  fmt::print("{}\n", text);
  std::fflush(stdout);
}

void nap(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

void reduce(const DeviceMesh& mesh, int64_t mesh_dim = 0) {
  const World::Scope scope(mesh.world(), "aten::mm");
  all_reduce(at::ones({4}), mesh, mesh_dim, ReduceOp::kSum);
}

int64_t given_victim = -1;

int64_t victim_of(const World& world) { return given_victim < 0 ? world.size() - 1 : given_victim; }

// The victim runs `wrong`. The others run `rest` and print its error, twice, since the job must stay failed.
void run(World& world, const std::function<void()>& wrong, const std::function<void()>& rest) {
  if (world.rank() == victim_of(world)) {
    nap(300);
    say("fault");
    wrong();
    return;
  }
  for (int i = 0; i < 2; ++i) {
    try {
      rest();
    } catch (const std::exception& error) {
      say(fmt::format("error: {}", error.what()));
    }
  }
}

void throw_in_callback(World& world) {
  try {
    world.guard("the user's callback at {tp: 2}", [] { throw std::out_of_range("index 7 is out of range"); });
  } catch (const std::out_of_range&) {
    // The job has failed even if the rank catches its own error.
  }
}

// Reduces something in a process that is forked, which prints the error.
void reduce_in_child(const DeviceMesh& mesh) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    try {
      reduce(mesh);
    } catch (const std::exception& error) {
      say(fmt::format("child: {}", error.what()));
    }
    _exit(0);
  }
  waitpid(child, nullptr, 0);
}

// Stops this process for a second; a child of it lets it go on.
void stop_for_a_while() {
  const pid_t self = getpid();
  const pid_t child = fork();
  if (child == 0) {
    nap(1000);
    kill(self, SIGCONT);
    _exit(0);
  }
  std::raise(SIGSTOP);
  waitpid(child, nullptr, 0);
}

// Leaves no descriptor for a new group.
void use_all_descriptors() {
  while (::open("/dev/null", O_RDONLY) >= 0) {
  }
}

// Opens files until all numbers below that of the newest one are taken, which it returns.
int fill_gaps() {
  int highest = 0;
  for (const auto& each : std::filesystem::directory_iterator("/proc/self/fd")) {
    highest = std::max(highest, std::stoi(each.path().filename()));
  }
  int fd = -1;
  do {
    fd = ::open("/dev/null", O_RDONLY);
  } while (fd >= 0 && fd <= highest);
  return fd;
}

// Allows no descriptor above `highest` to be opened.
void allow_descriptors_up_to(int highest) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = static_cast<rlim_t>(highest) + 1;
  setrlimit(RLIMIT_NOFILE, &limit);
}

// Fills the file system of the ranks' store, which failure_test has made small.
void fill_the_disk() {
  std::ofstream file(std::string(std::getenv("TESSERA_STORE")) + ".filler", std::ios::binary);
  const std::string block(4096, 'x');
  while (file.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
  }
}

// When rank 3 of four fails, rank 2 is in a collective with it; ranks 0 and 1 are not.
void fail_on_grid(const std::shared_ptr<World>& world) {
  const DeviceMesh grid = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world);
  reduce(grid, 0);
  reduce(grid, 1);
  run(
      *world, [&] { throw_in_callback(*world); },
      [&] {
        // Rank 0 waits for 1, which is busy; rank 2 waits for 3.
        if (world->rank() == 1) nap(1500);
        reduce(grid, 1);
        if (world->rank() < 2) reduce(grid, 0);
      });
}

// The rank that fails has started a collective in which the others take no part.
void fail_with_a_collective_begun(const DeviceMesh& mesh) {
  run(
      mesh.world(),
      [&] {
        {
          // Over Gloo the second one is made of messages.
          const PendingCollective few = start_all_reduce(at::ones({7}), mesh, 0, ReduceOp::kSum);
          const std::vector<int64_t> counts(static_cast<std::size_t>(mesh.size()), 1 << 20);
          const PendingCollective many = start_all_gather(at::ones({1 << 20}), counts, mesh, 0);
          throw_in_callback(mesh.world());
        }
        say("is over");
      },
      [&] {
        nap(1000);
        reduce(mesh);
      });
}

void fail_in_scatter(const DeviceMesh& mesh) {
  World& world = mesh.world();
  const int64_t source = world.size() - 1;
  const auto scatter_now = [&] { scatter(at::ones({7}), at::ones({2}), mesh, 0, source); };
  run(
      world,
      [&] {
        try {
          scatter_now();
        } catch (const std::invalid_argument& error) {
          say(fmt::format("own error: {}", error.what()));
        }
      },
      scatter_now);
}

// Rank 0 has no part in a permute, and leaves. Rank 1 of three waits for rank 2, which fails by `wrong`.
void fail_after_one_left(const DeviceMesh& mesh, const std::function<void()>& wrong) {
  World& world = mesh.world();
  const std::vector<int64_t> nothing = {0, 0, 0};
  if (world.rank() == 0) {
    permute(at::ones({0}), nothing, nothing, mesh, 0);
    std::_Exit(0);
  }
  run(world, wrong, [&] { permute(at::ones({0}), nothing, {0, 0, 3}, mesh, 0); });
}

// The last rank comes when most of the limit of 3 seconds is over, and then says that it starts MPI, but does not.
void come_late_and_not_start_mpi() {
  const Environment environment = resolve_environment(process_environment());
  if (environment.rank == environment.size - 1) {
    nap(2000);
    c10d::PrefixStore store("world0/tessera/mpi", make_store(environment));
    store.set(fmt::format("start/{}", environment.rank), "here");
    nap(5000);
    std::_Exit(0);
  }
  say("fault");
  World::from_environment();
}

// Every rank throws, one later than the other, and the job goes on with other Worlds.
void throw_alike_and_go_on() {
  try {
    const auto world = World::from_environment();
    reduce(init_device_mesh("cpu", {world->size()}, {"tp"}, world));
    nap(100 * static_cast<int>(world->rank()));
    throw std::out_of_range("every rank throws this");
  } catch (const std::out_of_range&) {
    // It has ended this rank's World.
  }
  const auto world = World::from_environment();
  reduce(init_device_mesh("cpu", {world->size()}, {"tp"}, world));
}

// The others have done all their work, and end.
void throw_when_others_are_done(const World& world) {
  if (world.rank() != victim_of(world)) return;
  nap(1000);
  say("fault");
  throw std::runtime_error("main catches this");
}

// The others have done all their work.
void stop_at_the_end(const World& world, bool in_mpi) {
  if (world.rank() != victim_of(world)) {
    fmt::print("last words");  // leaving must not lose what was not written yet
    return;
  }
  say("fault");
  stops_in_mpi = in_mpi;
  if (!in_mpi) std::raise(SIGSTOP);
}

void fail(const std::string& how) {
  if (how == "comes late and does not start MPI") return come_late_and_not_start_mpi();
  if (how == "throws alike and goes on") return throw_alike_and_go_on();
  if (how == "exits with 0 before it joins" && std::getenv("RANK") == std::string("2")) {
    // Without a World, no key in the store belongs to this process.
    nap(300);
    say("fault");
    std::_Exit(0);
  }
  if (how == "is stopped before the others join" && given_victim != std::stoll(std::getenv("RANK"))) nap(1500);
  if (how == "throws before the others join" && std::getenv("RANK") != std::string("2")) nap(2500);
  const auto world = World::from_environment();
  if (how == "is stopped before the others join") {
    say("fault");
    std::raise(SIGSTOP);
  }
  if (how == "ends well after a while") nap(3000);
  if (how == "names its backend") return say(std::string(to_string(world->cpu_backend())));
  if (how == "throws on a grid") return fail_on_grid(world);
  // A limit of descriptors that is set to this number stays below those of a group, whose end then gives none back.
  const int highest = fill_gaps();
  const DeviceMesh mesh = init_device_mesh("cpu", {world->size()}, {"tp"}, world);
  const bool early = how.find(" before ") != std::string::npos;
  if (!early) reduce(mesh);
  const std::string what = how.substr(0, how.find(" before"));
  const auto wait = [&] { reduce(mesh); };
  // The others have their World by then.
  if (early) nap(1000);
  if (what == "ends well with a child") reduce_in_child(mesh);
  if (what.starts_with("ends well")) return reduce(mesh);
  if (what == "throws to main when the others are done") return throw_when_others_are_done(*world);
  if (what == "stops at its end") return stop_at_the_end(*world, false);
  if (what == "stops in MPI_Finalize") return stop_at_the_end(*world, true);
  if (what == "ends late" || what == "ends very late") {
    say("ready");
    nap(what == "ends late" ? 4000 : 8000);
    return reduce(mesh);
  }
  if (what == "stops for a while") {
    if (world->rank() == victim_of(*world)) stop_for_a_while();
    return reduce(mesh);
  }
  if (what == "scatters a wrong shape") return fail_in_scatter(mesh);
  if (what == "throws with a collective begun") return fail_with_a_collective_begun(mesh);
  if (what == "does not come")
    return run(
        *world, [] { nap(4000); }, wait);
  if (what == "throws while others compute") {
    return run(
        *world, [&] { throw_in_callback(*world); },
        [&] {
          nap(1000);
          reduce(mesh);
        });
  }
  if (what == "does not come, and another has left") return fail_after_one_left(mesh, [] { nap(4000); });
  if (what == "exits with 0, and another has left") return fail_after_one_left(mesh, [] { std::_Exit(0); });
  if (what == "is killed while another lacks descriptors") {
    if (world->rank() == 1) allow_descriptors_up_to(highest);
    reduce(mesh);
    return run(
        *world, [] { std::raise(SIGKILL); }, wait);
  }
  const std::map<std::string, std::function<void()>> faults = {
      {"throws", [&] { throw_in_callback(*world); }},
      {"is killed", [] { std::raise(SIGKILL); }},
      {"is stopped", [] { std::raise(SIGSTOP); }},
      {"sends another size",
       [&] {
         try {
           all_reduce(at::ones({40}), mesh, 0, ReduceOp::kSum);
         } catch (const std::exception& error) {
           say(fmt::format("own error: {}", error.what()));
         }
       }},
      {"lacks descriptors",
       [&] {
         use_all_descriptors();
         try {
           reduce(mesh);
         } catch (const std::exception& error) {
           say(fmt::format("own error: {}", error.what()));
         }
       }},
      {"throws on a full disk",
       [&] {
         fill_the_disk();
         throw_in_callback(*world);
       }},
      {"is killed on a full disk",
       [] {
         fill_the_disk();
         std::raise(SIGKILL);
       }},
      {"exits with 3", [] { std::_Exit(3); }},
      {"exits with 0", [] { std::_Exit(0); }},
      {"calls exit", [] { std::exit(0); }},
      {"returns from main", [] {}},
      {"throws to main", [] { throw std::runtime_error("main catches this"); }},
      {"throws past main", [&] { world->guard("main", [] { throw std::runtime_error("nobody catches this"); }); }},
  };
  run(*world, faults.at(what), wait);
}

}  // namespace

int main(int argc, char** argv) {
  at::globalContext();
  if (argc < 2) return 2;
  if (argc > 2) given_victim = std::stoll(argv[2]);
  try {
    fail(argv[1]);
  } catch (const std::exception& error) {
    say(fmt::format("error: {}", error.what()));
    if (std::string(argv[1]).starts_with("throws to main")) return 1;
    throw;
  }
  // The launcher ends a job with a stopped rank only after another one has failed.
  return std::string(argv[1]).starts_with("is stopped") ? 3 : 0;
}
