#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/redistribute/region.h"
#include "tessera/placement/layout.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/blocks.h"
#include "tessera/tests/styles/tp_line.h"

// Trains under styles and in one process on the same numbers, and compares.
namespace tessera::testing {

inline constexpr int64_t kWidth = 24;  // features of the transformers

inline DeviceMesh grid() { return init_device_mesh(device_name(), {2, 2}, {"dp", "tp"}, world()); }

// The largest difference from one process, relative to the tensor's largest magnitude, that a test allows.
struct Tolerance {
  at::ScalarType dtype;
  double limit;
};
inline const std::vector<Tolerance> kTolerances = {{at::kDouble, 1e-12}, {at::kFloat, 1e-5}};

// Gives a step its input: plain where every rank of a 1-D mesh has it whole, else as this rank's piece.
struct Feed {
  DeviceMesh mesh;
  Placements placements;

  at::Tensor operator()(const at::Tensor& x) const {
    if (mesh.ndim() == 1 && all_replicate(placements)) return x.detach().clone().set_requires_grad(true);
    const Tile tile = local_tile(x.sizes(), placements, mesh.mesh().shape(), *mesh.coordinate());
    const at::Tensor piece = Region(tile, x.sizes().vec()).read(x.detach().clone());
    FromLocalOptions options;
    options.shape = x.sizes().vec();
    return from_local(piece.contiguous().detach(), mesh, placements, options).detach().set_requires_grad(true);
  }
};

// Makes one step forward and backward of `got` and `want` on the same input; compares outputs and the input's
// gradients.
template <class Module, class Parallel>
void step(Module& want, Parallel& got, const Feed& feed, const at::Tensor& x, double limit) {
  at::Tensor plain = x.detach().clone().set_requires_grad(true);
  const at::Tensor expected = want->forward(plain);
  expected.square().mean().backward();
  at::Tensor mine = feed(x);
  const at::Tensor y = got(mine);
  CHECK(difference(y, expected) <= limit);
  y.square().mean().backward();
  CHECK(difference(mine.grad(), plain.grad()) <= limit);
}

// Makes three steps; compares outputs and all gradients after each, and parameters at the end. `zero` names a parameter
// whose true gradient is zero, so that rounding alone remains and no relative limit fits. Where the optimizer divides a
// gradient by its own size (AdamW), that parameter's steps are rounding too, and `divides` leaves it out of the last
// comparison.
template <class Optimizer, class Make, class Options>
void train(const Make& make, const ParallelPlan& plan, const Feed& feed, const std::vector<int64_t>& shape,
           const Options& options, const Rows& zero, bool divides) {
  for (const Tolerance& t : kTolerances) {
    CAPTURE(c10::toString(t.dtype));
    auto reference = make(), module = make();
    fill(*reference, t.dtype);
    fill(*module, t.dtype);
    auto tp = parallelize_module(module, feed.mesh, plan);
    Optimizer ours(module->parameters(), options), theirs(reference->parameters(), options);
    for (uint64_t i = 0; i < 3; ++i) {
      CAPTURE(i);
      ours.zero_grad();
      theirs.zero_grad();
      step(reference, tp, feed, numbers(shape, 10 + i, t.dtype), t.limit);
      check_parameters(*module, *reference, /*gradients=*/true, t.limit, zero);
      ours.step();
      theirs.step();
    }
    check_parameters(*module, *reference, /*gradients=*/false, t.limit, divides ? zero : Rows{});
  }
}

template <class Make>
void train_sgd(const Make& make, const ParallelPlan& plan, const Feed& feed, const std::vector<int64_t>& shape,
               const Rows& zero = {}) {
  train<torch::optim::SGD>(make, plan, feed, shape, torch::optim::SGDOptions(0.05).momentum(0.9), zero, false);
}

template <class Make>
void train_adamw(const Make& make, const ParallelPlan& plan, const Feed& feed, const std::vector<int64_t>& shape,
                 const Rows& zero = {}) {
  train<torch::optim::AdamW>(make, plan, feed, shape, torch::optim::AdamWOptions(), zero, true);
}

}  // namespace tessera::testing
