#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <torch/nn/module.h>
#include <torch/types.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
// This comes after LibTorch, whose logging has a CHECK of its own.
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/step_folders.h"
#include "tessera/dtensor/io/training_state.h"
#include "tessera/dtensor/io/weights.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/in_process.h"
#include "tessera/mesh/world.h"
#include "tessera/tests/dtensor/io/test_files.h"
#include "tessera/tests/harness/skip.h"
#include "tessera/tools/launcher/child_process.h"

namespace tessera {
namespace {

constexpr const char* kPython = "../tessera_environment/python";

std::unique_ptr<torch::nn::Module> make_module(const DeviceMesh& mesh, double value) {
  auto module = std::make_unique<torch::nn::Module>();
  for (const char* name : {"a", "b", "c"}) {
    module->register_parameter(name, torch::full({6, 4}, value));
    distribute_in_place(module->named_parameters()[name], mesh, {Shard(0)}, kNoSource);
  }
  return module;
}

// Is one of two ranks. It saves step 1, and then step 2, while `victim` is killed after its first tensor. Returns 0
// when saving throws on the other rank long before the time limit.
int save_and_die(int64_t rank, int64_t victim, const std::string& folder) {
  WorldOptions options;
  options.rank = rank;
  options.size = 2;
  options.store = c10::make_intrusive<c10d::FileStore>(folder + "/store", 2);
  options.timeout = std::chrono::minutes(2);
  const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, World::create(options));
  const auto module = make_module(mesh, 1);
  TrainingState state = {.mesh = mesh, .model = *module, .step = 1};
  save_training_state(state, folder + "/states");
  state.step = 2;
  TrainingStateSaver saver(folder + "/states", {.progress = [&](int64_t, int64_t) {
                             if (rank == victim) ::kill(::getpid(), SIGKILL);
                           }});
  saver.start(state);
  const auto begin = std::chrono::steady_clock::now();
  try {
    saver.wait();
  } catch (const std::exception&) {
    return std::chrono::steady_clock::now() - begin < options.timeout / 4 ? 0 : 2;
  }
  return 1;
}

TEST_CASE("training state: when a rank is killed while saving, the older state stays, and the next save sweeps") {
  for (const int64_t victim : {0, 1}) {
    CAPTURE(victim);
    const TempFolder folder;
    std::vector<pid_t> ranks;
    for (const int64_t rank : {0, 1}) {
      ranks.push_back(start_child([&] {
        const int result = save_and_die(rank, victim, folder.path());
        ::_exit(result);  // without the destructors of libraries, whose threads a failed group may hold
        return result;
      }));
    }
    CHECK(wait_for(ranks[static_cast<std::size_t>(victim)]) == 1000 + SIGKILL);
    CHECK(wait_for(ranks[static_cast<std::size_t>(1 - victim)]) == 0);
    const std::string states = folder / "states";
    CHECK(newest_training_state(states) == states + "/step_00000001");
    const DeviceMesh mesh = init_device_mesh("cpu", {1}, {"tp"}, World::create({}));
    const auto module = make_module(mesh, 5);
    TrainingState state = {.mesh = mesh, .model = *module};
    CHECK(load_newest_training_state(state, states));
    CHECK(state.step == 1);
    CHECK(full_tensor(module->named_parameters()["b"]).eq(1).all().item<bool>());
    state.step = 2;
    save_training_state(state, states);
    CHECK(newest_training_state(states) == states + "/step_00000002");
    CHECK(std::distance(std::filesystem::directory_iterator(states), std::filesystem::directory_iterator()) == 2);
  }
}

// Is one of two ranks. Rank 1 does `wrong` after its first tensor. Returns 0 when rank 0 says `text` within its limit
// of two seconds and two more.
int save_beside(int64_t rank, const std::string& folder, const std::function<void()>& wrong, const std::string& text) {
  WorldOptions options;
  options.rank = rank;
  options.size = 2;
  options.store = c10::make_intrusive<c10d::FileStore>(folder + "/store", 2);
  options.timeout = std::chrono::seconds(2);
  const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, World::create(options));
  const auto module = make_module(mesh, 1);
  TrainingStateSaver saver(folder + "/states", {.progress = [&](int64_t, int64_t) {
                             if (rank == 1) wrong();
                           }});
  saver.start({.mesh = mesh, .model = *module, .step = 1});
  const auto start = std::chrono::steady_clock::now();
  try {
    saver.wait();
  } catch (const std::exception& error) {
    const bool says_it = std::string(error.what()).find(text) != std::string::npos;
    const bool in_time = std::chrono::steady_clock::now() - start < std::chrono::seconds(4);
    if (!says_it || !in_time) fmt::print(stderr, "rank {} said: {}\n", rank, error.what());
    return (says_it ? 0 : 2) + (in_time ? 0 : 4);
  }
  return 1;
}

void check_first_rank_says(const std::string& text, const std::function<void(const std::string& folder)>& wrong) {
  const TempFolder folder;
  std::vector<pid_t> ranks;
  for (const int64_t rank : {0, 1}) {
    ranks.push_back(start_child([&] {
      ::_exit(save_beside(
          rank, folder.path(), [&] { wrong(folder.path()); }, text));
      return 0;
    }));
  }
  CHECK(wait_for(ranks[0]) == 0);
  ::kill(ranks[1], SIGKILL);
  wait_for(ranks[1]);
}

TEST_CASE("training state: a rank that is stopped while saving is waited for once, not again by wait()") {
  check_first_rank_says("rank 1 has not written its part within 2 s; if it only needs longer, raise TESSERA_TIMEOUT",
                        // raise() stops this thread before it returns. After kill() of the process it could still write
                        // its part, until another thread stops them all.
                        [](const std::string&) { ::raise(SIGSTOP); });
}

TEST_CASE("training state: a rank that cannot even leave a file to say that it failed says so all the same") {
  check_first_rank_says("rank 1 failed in save_training_state: my display broke", [](const std::string& folder) {
    // Its file for that cannot be made.
    for (const auto& entry : std::filesystem::directory_iterator(folder + "/states")) {
      std::filesystem::create_symlink(folder + "/none/none", entry.path() / ".failed-1");
    }
    throw std::runtime_error("my display broke");
  });
}

// Saves on two ranks that are threads. The second one throws as it begins its first collective that `where` describes.
// Returns the first one's error.
std::string error_beside(const std::function<bool(const CollectiveRecord&)>& where,
                         const std::function<void(const TrainingState&)>& save) {
  std::string text;
  run_in_process(2, [&](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, world);
    const auto module = make_module(mesh, 1);
    module->register_buffer("sum", from_local(torch::ones({2}), mesh, {Partial()}));
    const auto observing = world->observe([&](const CollectiveRecord& record) {
      if (world->rank() == 1 && where(record)) throw std::runtime_error("my observer broke");
    });
    const std::string error = message_of([&] { save({.mesh = mesh, .model = *module, .step = 1}); });
    if (world->rank() == 0) text = error;
  });
  return text;
}

TEST_CASE("saving: an error of one rank between two agreements reaches the others, which do not wait for it") {
  const TempFolder folder;
  const auto save_state = [&](const TrainingState& state) { save_training_state(state, folder / "states"); };
  const auto save_model = [&](const TrainingState& state) { save_weights(state.model, folder / "weights"); };
  struct Row {
    const char* why;
    std::string kind;
    std::string op;  // "": any
    std::function<void(const TrainingState&)> save;
  };
  const std::vector<Row> rows = {
      {"the name of a state's folder", "broadcast", "", save_state},
      {"a sum that is pending in a state", "all_reduce", "redistribute", save_state},
      {"a weight that is gathered", "all_gather", "", save_model},
  };
  for (const Row& row : rows) {
    CAPTURE(row.why);
    const std::string text = error_beside(
        [&](const CollectiveRecord& record) {
          return record.kind == row.kind && (row.op.empty() || record.op == row.op);
        },
        row.save);
    CAPTURE(text);
    CHECK(text.find("rank 1 failed in ") != std::string::npos);
    CHECK(text.find(row.kind + " on mesh dimension tp of {tp: 2} on cpu: my observer broke") != std::string::npos);
  }
}

TEST_CASE("training state: Python's library reads the files, and zlib finds their checksums") {
  if (!std::filesystem::exists(kPython)) TESSERA_SKIP_MISSING("no Python of tools/setup here; run it with bazel test");
  const TempFolder folder;
  const DeviceMesh mesh = init_device_mesh("cpu", {1}, {"tp"}, World::create({}));
  const auto module = make_module(mesh, 2);
  const TrainingState state = {.mesh = mesh, .model = *module, .step = 12, .values = {{"name", "\xc3\xa9"}}};
  save_training_state(state, folder.path(), {.max_shard_bytes = 200, .block_bytes = 100});
  write_text(folder / "read.py", R"(
import json, sys, zlib
from pathlib import Path
from safetensors import safe_open

folder = Path(sys.argv[1])
saved = json.loads((folder / "state.json").read_text())["state"]
assert saved["step"] == 12 and saved["values"] == {"name": "\u00e9"}, saved
for name, file in saved["files"].items():
    data = (folder / name).read_bytes()
    step = file["block_bytes"]
    assert file["bytes"] == len(data)
    assert file["crc32"] == [f"{zlib.crc32(data[i:i + step]):08x}" for i in range(0, len(data), step)], name
index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
for name, file in index.items():
    with safe_open(folder / file, "numpy") as opened:
        assert (opened.get_tensor(name) == 2).all()
print(sorted(index), len(saved["files"]))
)");
  const std::string command = std::string(kPython) + " " + (folder / "read.py") + " " + (folder / "step_00000012") +
                              " > " + (folder / "out") + " 2>&1";
  CHECK(std::system(command.c_str()) == 0);
  CHECK(read_text(folder / "out") == "['a', 'b', 'c'] 3\n");
}

}  // namespace
}  // namespace tessera
