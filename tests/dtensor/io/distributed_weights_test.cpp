#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim.h>
#include <torch/types.h>
// This comes after LibTorch, whose logging has a CHECK of its own.
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/optimizer_state.h"
#include "tessera/dtensor/io/safetensors_file.h"
#include "tessera/dtensor/io/weights.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/world.h"
#include "tessera/tests/dtensor/io/same_message.h"
#include "tessera/tests/dtensor/io/shared_folder.h"
#include "tessera/tests/dtensor/io/test_files.h"
#include "tessera/tests/harness/ranks.h"

namespace tessera {
namespace {

using testing::world;

DeviceMesh line() { return init_device_mesh("cpu", {world()->size()}, {"tp"}, world()); }

// Has uneven tensors of several kinds, each with the placement that `distribute` gives it on a 1-D mesh.
struct Sample : torch::nn::Module {
  explicit Sample(double scale) {
    const auto values = [scale](std::vector<int64_t> shape, at::ScalarType dtype) {
      int64_t count = 1;
      for (const int64_t size : shape) count *= size;
      return (torch::arange(count, torch::kDouble) * scale).reshape(shape).to(dtype);
    };
    register_parameter("rows", values({7, 3}, torch::kFloat));
    register_parameter("columns", values({3, 10}, torch::kDouble));
    register_parameter("middle", values({2, 5, 4}, torch::kBFloat16));
    register_parameter("few", values({1, 2}, torch::kFloat));
    register_parameter("whole", values({4}, torch::kFloat));
    register_parameter("plain", values({3}, torch::kFloat));
    register_buffer("mask", values({6}, torch::kFloat).gt(2));
    register_parameter("alias", named_parameters()["rows"]);
  }

  void distribute(const DeviceMesh& mesh) {
    const auto place = [&](const char* name, std::vector<Placement> placements) {
      placements.resize(static_cast<std::size_t>(mesh.ndim()), Replicate());
      distribute_in_place(named_parameters()[name], mesh, placements, kNoSource);
    };
    place("rows", {Shard(0)});
    place("columns", {Shard(1), Shard(1)});
    place("middle", {Shard(1), Shard(0)});
    place("few", {Replicate(), Shard(0)});
    place("whole", {});
    distribute_in_place(named_buffers()["mask"], mesh, Placements(static_cast<std::size_t>(mesh.ndim()), Shard(0)),
                        kNoSource);
  }

  // Returns every tensor as a whole. Collective.
  std::vector<at::Tensor> values() const {
    const torch::NoGradGuard no_grad;
    std::vector<at::Tensor> all;
    const auto add = [&](const at::Tensor& t) { all.push_back(is_dtensor(t) ? full_tensor(t) : t.clone()); };
    for (const auto& item : named_parameters()) add(item.value());
    for (const auto& item : named_buffers()) add(item.value());
    return all;
  }
};

bool equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const at::Tensor& x, const at::Tensor& y) { return x.equal(y); });
}

void round_trip(const DeviceMesh& mesh) {
  const SharedFolder folder(mesh);
  const Sample plain(1.5);
  if (world()->rank() == 0) save_weights(plain, folder / "plain.safetensors");
  Sample sharded(1.5);
  sharded.distribute(mesh);
  save_weights(sharded, folder / "sharded.safetensors");
  save_weights(sharded, folder / "parts.safetensors", {.max_shard_bytes = 100});
  CHECK(read_text(folder / "plain.safetensors") == read_text(folder / "sharded.safetensors"));

  for (const char* name : {"plain.safetensors", "parts.safetensors"}) {
    CAPTURE(name);
    for (const bool in_place : {false, true}) {
      Sample loaded(-1);
      loaded.distribute(mesh);
      const at::Tensor handle = loaded.named_parameters()["rows"];
      load_weights(loaded, folder / name, {.in_place = in_place});
      CHECK(is_dtensor(handle));
      CHECK(equal(loaded.values(), plain.values()));
    }
    Sample one(-1);
    load_weights(one, folder / name);
    CHECK(equal(one.values(), plain.values()));
  }
}

TESSERA_RANKS_TEST_CASE("weights: saved byte-equal on any number of ranks, loaded into any placements", {1, 2, 3, 4}) {
  round_trip(line());
}

TESSERA_RANKS_TEST_CASE("weights: the same on a mesh of two dimensions", {4}) {
  round_trip(init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world()));
}

TESSERA_RANKS_TEST_CASE("weights: a rank reads the bytes of its pieces and no others", {2, 4}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  const auto make = [] {
    auto module = std::make_unique<torch::nn::Module>();
    module->register_parameter("rows", torch::ones({1024, 1000}));
    module->register_parameter("columns", torch::ones({512, 2000}));
    return module;
  };
  const auto module = make();
  distribute_in_place(module->named_parameters()["rows"], mesh, {Shard(0)}, kNoSource);
  distribute_in_place(module->named_parameters()["columns"], mesh, {Shard(1)}, kNoSource);
  save_weights(*module, folder / "m");
  std::pair<int64_t, int64_t> last;
  const int64_t before = bytes_read_by_process();
  load_weights(*module, folder / "m", {.progress = [&](int64_t done, int64_t total) { last = {done, total}; }});
  const int64_t read = bytes_read_by_process() - before;
  const int64_t pieces = (1024 * 1000 + 512 * 2000) * 4 / world()->size();
  CHECK((last == std::pair(pieces, pieces)));
  // /proc/self/io also counts the header, and what the collectives read from sockets.
  CHECK(read >= pieces);
  CHECK(read < pieces + 20000);
}

TESSERA_RANKS_TEST_CASE("weights: what fails on one rank or all is the same error everywhere, and nothing changes",
                        {1, 3}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  const bool last = world()->rank() == world()->size() - 1;
  Sample module(2);
  module.distribute(mesh);
  save_weights(module, folder / "m");
  Sample other(1);
  other.register_parameter("extra", torch::ones({2}));
  other.distribute(mesh);
  const std::vector<at::Tensor> before = other.values();
  const auto contains = [](const std::string& text, const std::string& want) {
    CAPTURE(text);
    CAPTURE(want);
    CHECK(text.find(want) != std::string::npos);
  };

  contains(same_message(mesh, [&] { load_weights(other, folder / "m"); }), "Missing in the file: 'extra'");
  const LoadOptions allow = {.allow_missing = {"ex*"}};
  const std::string by_last = world()->size() == 1 ? "" : "rank " + std::to_string(world()->size() - 1) + ": ";
  contains(same_message(mesh, [&] { load_weights(other, last ? folder / "none" : folder / "m", allow); }),
           by_last + "cannot open '");
  LoadOptions throwing = allow;
  throwing.progress = [&](int64_t done, int64_t total) {
    if (last && done == total) throw std::runtime_error("my display broke");
  };
  contains(same_message(mesh, [&] { load_weights(other, folder / "m", throwing); }), by_last + "my display broke");
  CHECK(equal(other.values(), before));

  const std::string nowhere = folder / "no/such/f";
  contains(same_message(mesh, [&] { save_weights(module, nowhere); }), "there is no folder '");
  contains(same_message(mesh, [&] { save_weights(module, ""); }), "the path is empty");
  if (world()->rank() == 0) std::filesystem::create_symlink("m", folder / "link");
  folder.wait();
  contains(same_message(mesh, [&] { save_weights(module, folder / "link"); }), "link': it is a symbolic link");
  if (world()->size() > 1) {
    contains(same_message(mesh, [&] { save_weights(module, folder / (last ? "x" : "y")); }),
             "save_weights: the ranks were called with different arguments");
    contains(same_message(mesh, [&] { save_weights(module, folder / "x", {.max_shard_bytes = last ? 0 : 50}); }),
             "called with different arguments");
  }
  folder.wait();
  CHECK_FALSE(std::filesystem::exists(folder / "x"));
  load_weights(other, folder / "m", allow);
  // "extra" is the last parameter, after which the one buffer comes.
  std::vector<at::Tensor> want = module.values();
  want.insert(want.end() - 1, torch::ones({2}));
  CHECK_FALSE(equal(before, want));
  CHECK(equal(other.values(), want));
}

TESSERA_RANKS_TEST_CASE("weights: a tensor that one rank alone cannot save or load is the same error everywhere",
                        {1, 3}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  const bool last = world()->rank() == world()->size() - 1;
  const std::string by_last = world()->size() == 1 ? "" : "rank " + std::to_string(world()->size() - 1) + ": ";
  const auto begins = [](const std::string& text, const std::string& want) {
    CAPTURE(text);
    CAPTURE(want);
    CHECK(text.starts_with(want));
  };
  const auto make = [&](const at::Tensor& odd) {
    auto module = std::make_unique<torch::nn::Module>();
    module->register_parameter("w", torch::ones({4, 2}));
    distribute_in_place(module->named_parameters()["w"], mesh, {Shard(0)}, kNoSource);
    module->register_buffer("odd", odd);
    return module;
  };
  const auto good = make(torch::zeros({2}));
  const torch::optim::SGD of_good(good->parameters(), torch::optim::SGDOptions(0.1));
  save_weights(*good, folder / "m");
  save_optimizer(of_good, *good, folder / "o");
  const auto on_meta = make(torch::zeros({2}, last ? torch::kMeta : torch::kCPU));
  torch::optim::SGD optimizer(on_meta->parameters(), torch::optim::SGDOptions(0.1));
  const std::string want = by_last + "tensor 'odd': a Float tensor on meta";
  begins(same_message(mesh, [&] { save_weights(*on_meta, folder / "m"); }), want);
  begins(same_message(mesh, [&] { load_weights(*on_meta, folder / "m"); }), want);
  begins(same_message(mesh, [&] { save_optimizer(optimizer, *on_meta, folder / "o"); }), want);
  begins(same_message(mesh, [&] { load_optimizer(optimizer, *on_meta, folder / "o"); }), want);
  const auto of_no_dtype = make(torch::zeros({2}, last ? torch::kComplexDouble : torch::kFloat));
  begins(same_message(mesh, [&] { save_weights(*of_no_dtype, folder / "m"); }),
         by_last + "saving tensor 'odd': safetensors has no dtype for ComplexDouble");
  folder.wait();
  load_weights(*good, folder / "m");
  CHECK(std::distance(std::filesystem::directory_iterator(folder.path()), std::filesystem::directory_iterator()) == 2);
}

TESSERA_RANKS_TEST_CASE(
    "weights: a disk that is full while saving is the same error everywhere, and the old file stays", {2}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  Sample module(2);
  module.distribute(mesh);
  save_weights(module, folder / "m");
  const std::string old = read_text(folder / "m");
  // A limit on the size of files stands for a full disk: write() fails in the data.
  rlimit before = {};
  ::getrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = old.size() - 10;
  folder.wait();
  if (world()->rank() == 0) ::setrlimit(RLIMIT_FSIZE, &small);
  const std::string text = same_message(mesh, [&] { save_weights(module, folder / "m"); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  CAPTURE(text);
  CHECK(text.find("rank 0: cannot write '") != std::string::npos);
  CHECK(read_text(folder / "m") == old);
}

TESSERA_RANKS_TEST_CASE("weights: a Partial is saved by its value and refused when loading", {2}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  torch::nn::Module module;
  module.register_buffer("sum", from_local(torch::ones({3}), mesh, {Partial()}));
  save_weights(module, folder / "m");
  const SafetensorsFile file(folder / "m");
  CHECK(file.read(*file.find("sum")).equal(torch::full({3}, 2.0)));
  CHECK(same_message(mesh, [&] {
          load_weights(module, folder / "m");
        }).find("tensor 'sum': it is [P(sum)]; redistribute it") != std::string::npos);
}

TESSERA_RANKS_TEST_CASE("weights: on a mesh over a part of the world, ranks outside it do nothing", {3}) {
  const DeviceMesh all = line();
  const SharedFolder folder(all);
  const DeviceMesh part(world(), c10::kCPU, Mesh({2}, {"tp"}, {2, 1}));
  torch::nn::Module module;
  module.register_parameter("w", torch::arange(10, torch::kFloat).reshape({5, 2}));
  distribute_in_place(module.named_parameters()["w"], part, {Shard(0)}, kNoSource);
  save_weights(module, folder / "m");
  folder.wait();
  const SafetensorsFile file(folder / "m");
  CHECK(file.read(*file.find("w")).equal(torch::arange(10, torch::kFloat).reshape({5, 2})));
  {
    const torch::NoGradGuard no_grad;
    to_local(module.named_parameters()["w"]).zero_();
  }
  load_weights(module, folder / "m");
  const at::Tensor local = to_local(module.named_parameters()["w"]).detach();
  const std::vector<std::vector<float>> want = {{}, {6, 7, 8, 9}, {0, 1, 2, 3, 4, 5}};
  CHECK(local.flatten().equal(torch::tensor(want[static_cast<std::size_t>(world()->rank())])));
}

TESSERA_RANKS_TEST_CASE("optimizer state: DTensors are saved as global tensors and loaded in their parameters' layouts",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  const auto make = [&](bool distributed) {
    auto module = std::make_unique<Sample>(1);
    if (distributed) module->distribute(mesh);
    return module;
  };
  const auto fill = [&](torch::optim::AdamW& optimizer, const Sample& module, bool distributed) {
    const torch::NoGradGuard no_grad;
    for (const char* name : {"rows", "columns", "whole"}) {
      const at::Tensor param = module.named_parameters()[name];
      const auto like = [&](double value) {
        const at::Tensor whole =
            torch::arange(param.numel(), torch::kDouble).mul(value).reshape(param.sizes()).to(param.scalar_type());
        return distributed ? distribute_tensor(whole, mesh, placements_of(param), kNoSource) : whole;
      };
      auto state = std::make_unique<torch::optim::AdamWParamState>();
      state->step(5);
      state->exp_avg(like(0.5));
      state->exp_avg_sq(like(0.25));
      optimizer.state()[param.unsafeGetTensorImpl()] = std::move(state);
    }
  };
  const auto plain = make(false);
  torch::optim::AdamW plain_optimizer(plain->parameters());
  fill(plain_optimizer, *plain, false);
  if (world()->rank() == 0) save_optimizer(plain_optimizer, *plain, folder / "plain");

  const auto sharded = make(true);
  torch::optim::AdamW optimizer(sharded->parameters());
  fill(optimizer, *sharded, true);
  save_optimizer(optimizer, *sharded, folder / "sharded");
  CHECK(read_text(folder / "plain") == read_text(folder / "sharded"));

  const auto other = make(true);
  torch::optim::AdamW loaded(other->parameters());
  load_optimizer(loaded, *other, folder / "sharded");
  CHECK(loaded.state().size() == 3);
  const at::Tensor param = other->named_parameters()["columns"];
  const auto& state = static_cast<torch::optim::AdamWParamState&>(*loaded.state().at(param.unsafeGetTensorImpl()));
  CHECK(state.step() == 5);
  CHECK(placements_of(state.exp_avg()) == placements_of(param));
  save_optimizer(loaded, *other, folder / "again");
  CHECK(read_text(folder / "again") == read_text(folder / "plain"));
}

}  // namespace
}  // namespace tessera
