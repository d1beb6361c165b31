// Tests how training states are saved and loaded: in common, at once, by several jobs, and when something fails.

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <future>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <torch/nn/module.h>
#include <torch/optim.h>
#include <torch/types.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
// This comes after LibTorch, whose logging has a CHECK of its own.
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/optimizer_state.h"
#include "tessera/dtensor/io/safetensors_file.h"
#include "tessera/dtensor/io/step_folders.h"
#include "tessera/dtensor/io/training_state.h"
#include "tessera/dtensor/io/weights.h"
#include "tessera/dtensor/loss_scaler.h"
#include "tessera/dtensor/random.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/world.h"
#include "tessera/tests/dtensor/io/same_message.h"
#include "tessera/tests/dtensor/io/sample_state.h"
#include "tessera/tests/dtensor/io/shared_folder.h"
#include "tessera/tests/dtensor/io/test_files.h"
#include "tessera/tests/harness/ranks.h"

namespace tessera {
namespace {

using testing::world;

TESSERA_RANKS_TEST_CASE("training state: the weights are in the files that save_weights writes, on any mesh",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  Sample module(mesh, 1.5);
  for (const int64_t parts : {0, 300}) {
    const std::string root = folder / std::to_string(parts);
    save_training_state(module.state(1), root, {.max_shard_bytes = parts, .block_bytes = 1000});
    std::vector<std::string> files = entries_in(root + "/step_00000001");
    std::erase(files, "state.json");
    std::erase(files, ".saved_by");
    std::filesystem::create_directories(root + "/weights");
    folder.wait();
    save_weights(module, root + "/weights", {.max_shard_bytes = parts});
    CHECK(files == entries_in(root + "/weights"));
    CHECK(files.size() == (parts == 0 ? 1 : 4));
    for (const std::string& name : files)
      CHECK(read_text(root + "/step_00000001/" + name) == read_text(root + "/weights/" + name));
    Sample loaded(mesh, -2);
    TrainingState state = loaded.state(0);
    CHECK(load_newest_training_state(state, root));
    CHECK(state.step == 1);
    CHECK(loaded.value() == 1.5);
  }
}

TESSERA_RANKS_TEST_CASE("training state: a mesh does not replace what another mesh of the job has saved", {2, 4}) {
  const int64_t size = world()->size();
  const DeviceMesh all = init_device_mesh("cpu", {2, size / 2}, {"pp", "tp"}, world());
  const bool is_first = world()->rank() < size / 2;
  const SharedFolder folder(all);
  Sample stage(all["tp"], is_first ? 1 : 2);
  const auto refused = [&](int64_t step) {
    return fmt::format("ranks {} cannot save '{}', which ranks {} of this job have saved", size == 2 ? "1" : "2, 3",
                       folder / step_folder_name(step), size == 2 ? "0" : "0, 1");
  };
  if (is_first) save_training_state(stage.state(1), folder.path());
  folder.wait();
  if (!is_first) contains(message_of([&] { save_training_state(stage.state(1), folder.path()); }), refused(1));

  // Both begin, and the first one is faster.
  std::promise<void> may_write;
  const std::shared_future<void> allowed = may_write.get_future().share();
  TrainingStateSaver saver(folder.path(), {.progress = [&](int64_t, int64_t) { allowed.wait(); }});
  saver.start(stage.state(2));
  folder.wait();
  if (is_first) may_write.set_value();
  if (is_first) saver.wait();
  folder.wait();
  if (!is_first) may_write.set_value();
  if (!is_first) contains(message_of([&] { saver.wait(); }), refused(2));
  folder.wait();
  CHECK(entries_in(folder.path()) == std::vector<std::string>{"step_00000001", "step_00000002"});
  folder.wait();
  if (!is_first) return;
  save_training_state(stage.state(2), folder.path());  // a mesh replaces its own
  stage.fill(3);
  TrainingState state = stage.state(0);
  CHECK(load_newest_training_state(state, folder.path()));
  CHECK(stage.value() == 1);
}

TESSERA_RANKS_TEST_CASE("training state: start holds the values of the call, while the thread has not written them",
                        {1, 2, 4}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  Sample module(mesh, 1);
  std::promise<void> may_write;
  const std::shared_future<void> allowed = may_write.get_future().share();
  TrainingStateSaver saver(folder.path(), {.progress = [&](int64_t, int64_t) { allowed.wait(); }});
  saver.start(module.state(1));
  module.fill(2);
  module.mesh.world().random_state().counter += 5;
  // The thread of a rank that has nothing to write may have ended.
  if (world()->rank() == 0) CHECK_FALSE(saver.done());
  CHECK_FALSE(newest_training_state(folder.path()).has_value());
  may_write.set_value();
  saver.wait();
  CHECK(saver.done());
  saver.wait();  // there is nothing to wait for
  saver.start(module.state(2));
  module.fill(3);
  saver.start(module.state(3));  // waits for the second one
  saver.wait();
  CHECK(entries_in(folder.path()) == std::vector<std::string>{"step_00000001", "step_00000002", "step_00000003"});
  const uint64_t counter = module.mesh.world().random_state().counter;
  for (const int64_t step : {3, 1, 2}) {
    TrainingState state = module.state(0);
    load_training_state(state, folder / step_folder_name(step));
    CHECK(state.step == step);
    CHECK(module.value() == static_cast<double>(step));
    CHECK(module.mesh.world().random_state().counter == (step == 1 ? counter - 5 : counter));
  }
}

TESSERA_RANKS_TEST_CASE(
    "training state: a save makes one broadcast and two small all_reduces per mesh dimension, a load two", {4}) {
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world());
  const SharedFolder folder(mesh);
  Sample module(mesh, 1);
  CommCounter counter(mesh);
  TrainingStateSaver saver(folder.path());
  saver.start(module.state(1));
  CHECK(counter.count("broadcast") == 2);
  CHECK(counter.count("all_reduce") == 2);
  CHECK(counter.bytes("all_reduce") == 80);
  saver.wait();
  CHECK(counter.count("all_reduce") == 4);
  CHECK(counter.total() == 6);
  counter.reset();
  TrainingState state = module.state(0);
  CHECK(load_newest_training_state(state, folder.path()));
  CHECK(counter.count("all_reduce") == 4);
  CHECK(counter.total() == 4);
}

TESSERA_RANKS_TEST_CASE(
    "training state: a rank writes its bytes and no others, and reads the blocks of its pieces once", {2, 4}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  auto module = std::make_shared<torch::nn::Module>();
  module->register_parameter("a", torch::ones({1024, 1000}));
  module->register_parameter("b", torch::ones({1000, 1024}));
  for (const char* name : {"a", "b"})
    distribute_in_place(module->named_parameters()[name], mesh, {name[0] == 'a' ? Shard(0) : Replicate()}, kNoSource);
  TrainingState state = {.mesh = mesh, .model = *module, .step = 1};
  constexpr int64_t kBlock = 10000;
  constexpr int64_t kTensor = int64_t{1024} * 1000 * 4;
  int64_t written = 0;
  save_training_state(state, folder.path(), {.block_bytes = kBlock, .progress = [&](int64_t done, int64_t total) {
                                               written = done;
                                               CHECK(done <= total);
                                             }});
  CHECK(written >= 2 * kTensor / world()->size() - 2 * 65536);
  CHECK(written <= 2 * kTensor / world()->size() + 2 * 65536);
  const int64_t before = bytes_read_by_process();
  load_training_state(state, folder / "step_00000001");
  const int64_t read = bytes_read_by_process() - before;
  // A rank reads its rows of `a` and all of `b`, in whole blocks. /proc/self/io also counts state.json (15 bytes per
  // block and file), and what the collectives read from sockets.
  const int64_t pieces = kTensor / world()->size() + kTensor;
  CHECK(read >= pieces);
  CHECK(read < pieces + 2 * kBlock + 40000);
}

TESSERA_RANKS_TEST_CASE("training state: the last K are kept, and the newest whole one is loaded", {1, 3}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  Sample module(mesh, 0);
  TrainingStateSaver saver(folder.path(), {.keep = 2});
  for (const int64_t step : {1, 2, 3, 12}) {
    module.fill(static_cast<double>(step));
    saver.start(module.state(step));
  }
  saver.wait();
  CHECK(entries_in(folder.path()) == std::vector<std::string>{"step_00000003", "step_00000012"});
  folder.wait();
  saver.save(module.state(12));  // replaces it
  folder.wait();
  if (world()->rank() == 0) write_text(folder / "step_00000012/state.json", "{");
  folder.wait();
  TrainingState state = module.state(0);
  contains(same_message(mesh, [&] { load_training_state(state, folder / "step_00000012"); }),
           "do not begin and end as");
  CHECK(load_newest_training_state(state, folder.path()));
  CHECK(state.step == 3);
  CHECK(module.value() == 3);
}

TESSERA_RANKS_TEST_CASE("training state: a byte that was changed in any file is found, and nothing is loaded", {1, 3}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  Sample module(mesh, 1);
  torch::optim::SGD optimizer(module.parameters(), torch::optim::SGDOptions(0.0).momentum(0.5));
  for (at::Tensor& p : module.parameters()) p.mutable_grad() = p.detach() * 2;
  optimizer.step();
  TrainingState state = {.mesh = mesh, .model = module, .optimizer = &optimizer, .step = 4};
  save_training_state(state, folder.path(), {.max_shard_bytes = 1000, .block_bytes = 128});
  const std::string step = folder / "step_00000004";
  std::vector<std::string> files = entries_in(step);
  std::erase(files, ".saved_by");
  CHECK(files.size() == 9);  // three parts and an index, twice, and state.json
  module.fill(7);
  state.step = 0;
  for (const std::string& name : files) {
    CAPTURE(name);
    const auto bytes = static_cast<int64_t>(std::filesystem::file_size(step + "/" + name));
    for (const int64_t position : {int64_t{9}, bytes / 2, bytes - 1}) {
      if (world()->rank() == 0) flip_byte(step + "/" + name, position);
      folder.wait();
      const std::string text = same_message(mesh, [&] { load_training_state(state, step); });
      contains(text, step + "/" + name + "'");
      contains(text, name == "state.json" ? "torn, damaged" : "checksum");
      if (name != "state.json") contains(text, "block " + std::to_string(position / 128) + " ");
      folder.wait();
      if (world()->rank() == 0) flip_byte(step + "/" + name, position);
      folder.wait();
    }
  }
  CHECK(module.value() == 7);
  CHECK(state.step == 0);
  load_training_state(state, step);
  CHECK(module.value() == 1);
}

TESSERA_RANKS_TEST_CASE("training state: where the newest one is damaged, an older one is loaded", {1, 3}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  Sample module(mesh, 0);
  for (const int64_t step : {1, 2, 3}) {
    module.fill(static_cast<double>(step));
    save_training_state(module.state(step), folder.path(), {.block_bytes = 128});
  }
  TrainingState state = module.state(0);
  const auto damage = [&](const char* step, int64_t position) {
    folder.wait();
    if (world()->rank() == 0) flip_byte(folder / (std::string(step) + "/model.safetensors"), position);
    folder.wait();
  };
  damage("step_00000003", 9);  // in the header, which every rank reads
  CHECK(load_newest_training_state(state, folder.path()));
  CHECK(state.step == 2);
  CHECK(module.value() == 2);
  const auto bytes = static_cast<int64_t>(std::filesystem::file_size(folder / "step_00000002/model.safetensors"));
  damage("step_00000002", bytes - 1);  // in a piece that one rank reads
  CHECK(load_newest_training_state(state, folder.path()));
  CHECK(state.step == 1);
  CHECK(module.value() == 1);
  damage("step_00000001", bytes / 2);
  module.fill(7);
  contains(same_message(mesh, [&] { load_newest_training_state(state, folder.path()); }),
           "step_00000003/model.safetensors': block 0 ");
  CHECK(module.value() == 7);
  CHECK(state.step == 1);
  // A state that does not fit is not damaged: no older state is taken.
  damage("step_00000001", bytes / 2);
  damage("step_00000003", 9);
  Sample other(mesh, 7);
  other.register_parameter("more", torch::zeros({2}));
  TrainingState of_other = other.state(0);
  contains(same_message(mesh, [&] { load_newest_training_state(of_other, folder.path()); }), "more");
  CHECK(of_other.step == 0);
}

TESSERA_RANKS_TEST_CASE("training state: two jobs that save into one folder at once do not mix", {4}) {
  const DeviceMesh all = line();
  const SharedFolder folder(all);
  const int64_t job = world()->rank() / 2;
  WorldOptions options;
  options.rank = world()->rank() % 2;
  options.size = 2;
  options.store = c10::make_intrusive<c10d::PrefixStore>(std::to_string(job), world()->store());
  Sample module(init_device_mesh("cpu", {2}, {"tp"}, World::create(options)), 0);
  TrainingStateSaver saver(folder.path(), {.keep = 3});
  for (int64_t round = 1; round <= 10; ++round) {
    module.fill(static_cast<double>(10 * round + job));
    saver.start(module.state(round));
  }
  saver.wait();
  folder.wait();
  // A job may remove a step just before the other replaces it, so the number of steps may be higher.
  const auto steps = step_folders(folder.path());
  CHECK(steps.size() >= 3);
  CHECK(entries_in(folder.path()).size() == steps.size());
  for (const auto& [step, path] : steps) {
    TrainingState state = module.state(0);
    load_training_state(state, path);
    CHECK(state.step == step);
    const double value = module.value();
    CHECK((value == static_cast<double>(10 * step) || value == static_cast<double>(10 * step + 1)));
  }
  folder.wait();
}

TESSERA_RANKS_TEST_CASE("training state: ranks that see different checkpoints load none", {2, 3}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  Sample module(mesh, 1);
  torch::optim::SGD optimizer(module.parameters(), torch::optim::SGDOptions(0.1).momentum(0.5));
  for (const char* name : {"a", "b"}) {
    for (at::Tensor& p : module.parameters()) p.mutable_grad() = p.detach() * 2;
    optimizer.step();
    save_training_state(module.state(1), folder / name);
    save_weights(module, folder / (std::string(name) + ".safetensors"));
    save_optimizer(optimizer, module, folder / (std::string(name) + ".optimizer"));
  }
  module.fill(9);
  const std::string mine = folder / (is_last() ? "b" : "a");
  TrainingState state = module.state(0);
  contains(same_message(mesh, [&] { load_newest_training_state(state, mine); }), "the ranks found different training");
  contains(same_message(mesh, [&] { load_newest_training_state(state, is_last() ? folder / "none" : mine); }),
           "the ranks found different training states");
  contains(same_message(mesh, [&] { load_weights(module, mine + ".safetensors"); }), "the ranks opened different");
  contains(same_message(mesh, [&] { load_optimizer(optimizer, module, mine + ".optimizer"); }),
           "the ranks opened different");
  const std::string last = "rank " + std::to_string(world()->size() - 1) + ": ";
  contains(
      same_message(mesh, [&] { load_training_state(state, is_last() ? folder / "none" : mine + "/step_00000001"); }),
      last + "cannot open '" + folder / "none/state.json'");
  CHECK_FALSE(load_newest_training_state(state, folder / "none"));
  CHECK(module.value() == 9);
  CHECK(state.step == 0);
}

TESSERA_RANKS_TEST_CASE("training state: a failure of the first rank is named, though the others write after it",
                        {2, 3}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  Sample module(mesh, 1);
  TrainingStateSaver saver(folder.path(), {.max_shard_bytes = 100, .progress = [](int64_t done, int64_t total) {
                                             if (world()->rank() == 0 && done == total)
                                               throw std::runtime_error("full");
                                             // The others open their next files after that.
                                             if (world()->rank() != 0) ::usleep(300'000);
                                           }});
  saver.start(module.state(1));
  CHECK(same_message(mesh, [&] { saver.wait(); }) == "rank 0: full");
  folder.wait();
  CHECK(std::filesystem::is_empty(folder.path()));
}

TESSERA_RANKS_TEST_CASE("training state: what fails on one rank is the same error everywhere, and leaves nothing",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  Sample module(mesh, 1);
  const std::string by_last = world()->size() == 1 ? "" : "rank " + std::to_string(world()->size() - 1) + ": ";
  const auto no_traces = [&] {
    folder.wait();
    CHECK(std::filesystem::is_empty(folder.path()));
    folder.wait();
  };
  TrainingStateSaver saver(folder.path(), {.progress = [](int64_t done, int64_t total) {
                             if (is_last() && done == total) throw std::runtime_error("my display broke");
                           }});
  saver.start(module.state(1));
  contains(same_message(mesh, [&] { saver.wait(); }), by_last + "my display broke");
  CHECK(message_of([&] { saver.wait(); }) == "nothing was thrown");
  saver.start(module.state(2));
  contains(same_message(mesh, [&] { saver.start(module.state(3)); }), by_last + "my display broke");
  no_traces();

  const auto save = [&](SaveStateOptions options) { save_training_state(module.state(1), folder.path(), options); };
  contains(same_message(mesh, [&] { save({.keep = -1}); }), "keep is -1");
  contains(same_message(mesh, [&] { save({.block_bytes = 4194305}); }), "block_bytes is 4194305");
  contains(same_message(mesh, [&] { save({.max_shard_bytes = -1}); }), "max_shard_bytes is -1");
  contains(same_message(mesh, [&] { save_training_state(module.state(-1), folder.path()); }), "step is -1");
  const int64_t largest = std::numeric_limits<int64_t>::max();
  contains(same_message(mesh, [&] { save_training_state(module.state(largest), folder.path()); }),
           "step is 9223372036854775807");
  TrainingState state = module.state(1);
  state.values["x"] = "\xff";
  contains(same_message(mesh, [&] { save_training_state(state, folder.path()); }), "is not UTF-8");
  torch::nn::Module broad;  // 100 million checksums
  broad.register_buffer("b", torch::zeros({1}, torch::kByte).expand({100'000'000}));
  const TrainingState of_broad = {.mesh = mesh, .model = broad, .step = 1};
  contains(same_message(mesh, [&] { save_training_state(of_broad, folder.path(), {.block_bytes = 1}); }),
           "bytes, and at most 1073741824 are read");
  if (world()->size() > 1) {
    contains(same_message(mesh, [&] { save_training_state(module.state(is_last() ? 5 : 6), folder.path()); }),
             "save_training_state: the ranks would save different states");
    const DeviceMesh one(world(), c10::kCPU, Mesh({1}, {"one"}, {0}));
    if (world()->rank() == 0) {
      TrainingState part = {.mesh = one, .model = module, .step = 1};
      contains(message_of([&] { save_training_state(part, folder.path()); }), "is on {tp: ");
    }
  }
  no_traces();

  save_training_state(module.state(1), folder.path());
  torch::optim::SGD optimizer(module.parameters(), 0.1);
  torch::optim::StepLR scheduler(optimizer, 1);
  state.scheduler = &scheduler;
  contains(same_message(mesh, [&] { load_newest_training_state(state, folder.path()); }),
           "was saved without a scheduler");
  state.optimizer = &optimizer;
  contains(same_message(mesh, [&] { load_newest_training_state(state, folder.path()); }),
           "was saved without an optimizer");
  LossScaler scaler({.initial_scale = 8});
  TrainingState with_scaler = {.mesh = mesh, .model = module, .scaler = &scaler};
  contains(same_message(mesh, [&] { load_newest_training_state(with_scaler, folder.path()); }),
           "was saved without a loss scaler");
  CHECK((scaler.state() == LossScalerState{.scale = 8, .good_steps = 0}));
}

TESSERA_RANKS_TEST_CASE("training state: a disk that is full is the same error everywhere, and the older state stays",
                        {1, 2}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  Sample module(mesh, 1);
  save_training_state(module.state(1), folder.path());
  // A limit on the size of files stands for a full disk: pwrite() fails in the data of the last rank.
  rlimit before = {};
  ::getrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 10000;
  folder.wait();
  if (is_last()) ::setrlimit(RLIMIT_FSIZE, &small);
  const std::string text = same_message(mesh, [&] { save_training_state(module.state(2), folder.path()); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  contains(text, world()->size() == 1 ? "cannot set the size of '" : "rank 1: cannot write '");
  folder.wait();
  CHECK(entries_in(folder.path()) == std::vector<std::string>{"step_00000001"});
}

TESSERA_RANKS_TEST_CASE("training state: each slice of a mesh saves alone, and writes of two slices are refused", {4}) {
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world());
  const SharedFolder folder(mesh);
  const DeviceMesh slice = mesh["tp"];
  Sample module(slice, 2);
  TrainingState both = {.mesh = mesh, .model = module, .step = 1};
  contains(message_of([&] { save_training_state(both, folder.path()); }), "on slices of a mesh");
  const std::string own = folder / std::to_string(mesh.local_rank("dp"));
  save_training_state(module.state(1), own);
  module.fill(3);
  TrainingState state = module.state(0);
  CHECK(load_newest_training_state(state, own));
  CHECK(module.value() == 2);
}

}  // namespace
}  // namespace tessera
