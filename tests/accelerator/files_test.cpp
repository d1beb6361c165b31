// Tests that files get the values that ranks have queued on streams of their own, and that a device gets those of
// files, through buffers that are used again.

#include <chrono>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/nn/module.h>
#include <torch/optim/sgd.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/training_state.h"
#include "tessera/dtensor/io/weights.h"
#include "tessera/tests/accelerator/late_stream.h"
#include "tessera/tests/accelerator/streams.h"
#include "tessera/tests/dtensor/io/shared_folder.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/tp_line.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

// A copy that does not wait for its source finds other values: the last tensor that a rank makes takes seven pieces of
// work. A copy that nobody waits for ends after the tensor has been read.
constexpr std::chrono::milliseconds kLeast(5);
constexpr int64_t kLargeRows = 500'000;  // of 10 numbers in float64: 40 MB, which pass through each buffer twice

at::Tensor cut_rows(const at::Tensor& whole, const DeviceMesh& mesh) {
  return distribute_tensor(whole, mesh, {Shard(0)}, kNoSource);
}

// While it exists, streams that are no rank's own, such as those that copy files, take at least `least` for each piece
// of work. Every rank sets the same.
class LateOthers {
 public:
  explicit LateOthers(std::chrono::microseconds least) { set(least); }
  ~LateOthers() { set({}); }
  LateOthers(const LateOthers&) = delete;
  LateOthers& operator=(const LateOthers&) = delete;

 private:
  static void set(std::chrono::microseconds least) {
    for (int64_t id = 1 + world_size(); id < kStreams; ++id) {
      late_stream(c10::Stream(c10::Stream::UNSAFE, c10::Device(kAccelerator, 0), id)).take_at_least(least);
    }
  }
};

// Has one tensor that is cut, one whose pieces are not in one part of it, and one that no buffer holds.
struct Weights : torch::nn::Module {
  Weights(double first, const DeviceMesh& mesh)
      : cut(register_parameter("cut", cut_rows(late_numbers(first, 5, 7), mesh))),
        scattered(register_parameter(
            "scattered", distribute_tensor(late_numbers(first + 1, 6, 4), mesh, {BlockCyclic(0, 1)}, kNoSource))),
        large(register_parameter("large", late_numbers(first + 2, kLargeRows, 10))) {}

  bool are_those_of(double first) const {
    return same_values(full_tensor(cut), numbers_at_once(first, 5, 7)) &&
           same_values(full_tensor(scattered), numbers_at_once(first + 1, 6, 4)) &&
           same_values(large, numbers_at_once(first + 2, kLargeRows, 10));
  }

  at::Tensor cut, scattered, large;
};

}  // namespace

TESSERA_RANKS_TEST_CASE("weights are saved as they were queued, and are loaded in place", {1, 2}) {
  const DeviceMesh mesh = tp_line();
  const SharedFolder folder(mesh);
  {
    const OwnStream late(0, kLeast);
    save_weights(Weights(1, mesh), folder / "model.safetensors");
    folder.wait();
  }
  const OwnStream stream;
  const LateOthers others(4 * kLeast);
  for (const bool in_place : {true, false}) {
    CAPTURE(in_place);
    Weights loaded(100, mesh);
    load_weights(loaded, folder / "model.safetensors", {.in_place = in_place});
    CHECK(loaded.are_those_of(1));
  }
}

TESSERA_RANKS_TEST_CASE("a training state has the values of the call, though the device changes them at once", {1, 2}) {
  const DeviceMesh mesh = tp_line();
  const OwnStream stream(0, kLeast);
  const SharedFolder folder(mesh);
  const auto optimizer_of = [](Weights& weights) {
    return torch::optim::SGD(weights.parameters(), torch::optim::SGDOptions(1).momentum(0.5));
  };
  Weights weights(1, mesh);
  torch::optim::SGD optimizer = optimizer_of(weights);
  const auto step = [](Weights& of, torch::optim::SGD& by) {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& each : of.parameters()) each.mutable_grad() = at::ones_like(each);
    by.step();
  };
  step(weights, optimizer);  // by 1
  {
    TrainingStateSaver saver(folder.path());
    saver.start({.mesh = mesh, .model = weights, .optimizer = &optimizer, .step = 1});
    const at::NoGradGuard no_grad;
    for (const at::Tensor& each : weights.parameters()) each.zero_();
    saver.wait();
  }
  Weights loaded(100, mesh);
  torch::optim::SGD its_optimizer = optimizer_of(loaded);
  TrainingState state{.mesh = mesh, .model = loaded, .optimizer = &its_optimizer};
  REQUIRE(load_newest_training_state(state, folder.path()));
  CHECK(loaded.are_those_of(0));
  step(loaded, its_optimizer);  // by 1 + 0.5
  CHECK(loaded.are_those_of(-1.5));
}
