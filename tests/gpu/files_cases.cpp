// Tests that weights and a training state go to files and back while the device works, and that training goes on from
// them as if it had not stopped.

#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/optim/adamw.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/fused_adamw.h"
#include "tessera/dtensor/io/training_state.h"
#include "tessera/dtensor/io/weights.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/dtensor/io/shared_folder.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/block_plans.h"
#include "tessera/tests/styles/blocks.h"
#include "tessera/tests/styles/tp_line.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

// A block on the mesh with the optimizer of its steps, and the one that files are written of.
struct Run {
  explicit Run(const DeviceMesh& on_mesh)
      : mesh(on_mesh),
        block(filled()),
        parallel(parallelize_module(block, mesh, kBlock)),
        fused(block->parameters(), {.lr = 1e-2}),
        files(block->parameters()) {}

  static Block filled() {
    Block fresh(64, 4, 256);
    fill(*fresh, at::kFloat);
    return fresh;
  }
  void steps(int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      fused.zero_grad();
      parallel(numbers({2, 8, 64}, static_cast<uint64_t>(i + 1), at::kFloat)).square().mean().backward();
      fused.step();
    }
  }
  TrainingState state(int64_t step) { return {.mesh = mesh, .model = *block, .optimizer = &files, .step = step}; }

  DeviceMesh mesh;
  Block block;
  Parallelized<Block> parallel;
  FusedAdamW fused;
  torch::optim::AdamW files;
};

void check_equal(const Run& got, const Run& want) {
  const std::vector<at::Tensor> have = got.block->parameters(), expected = want.block->parameters();
  for (std::size_t i = 0; i < expected.size(); ++i) {
    CAPTURE(i);
    CHECK(to_local(have[i].detach()).equal(to_local(expected[i].detach())));
  }
}

}  // namespace

TESSERA_RANKS_TEST_CASE("weights are saved behind queued steps, and loaded in place and by way of the host", {1, 2}) {
  const DeviceMesh mesh = tp_line();
  const SharedFolder folder(mesh);
  Run run(mesh);
  run.steps(0, 3);
  save_weights(*run.block, folder / "model.safetensors");
  folder.wait();
  for (const bool in_place : {true, false}) {
    CAPTURE(in_place);
    Run loaded(mesh);
    load_weights(*loaded.block, folder / "model.safetensors", {.in_place = in_place});
    check_equal(loaded, run);
  }
}

TESSERA_RANKS_TEST_CASE("training goes on from a saved state as if it had not stopped", {1, 2}) {
  const DeviceMesh mesh = tp_line();
  const SharedFolder folder(mesh);
  Run whole(mesh);
  whole.steps(0, 6);
  Run first(mesh);
  first.steps(0, 3);
  first.fused.give_state(first.files);
  {
    TrainingStateSaver saver(folder.path());
    saver.start(first.state(3));
    first.steps(3, 4);  // changes what is being saved
    saver.wait();
  }
  Run second(mesh);
  TrainingState state = second.state(0);
  REQUIRE(load_newest_training_state(state, folder.path()));
  CHECK(state.step == 3);
  second.fused.take_state(second.files);
  second.steps(3, 6);
  check_equal(second, whole);
}
