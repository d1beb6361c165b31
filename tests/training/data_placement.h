#pragma once

#include <optional>

#include <doctest/doctest.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/redistribute/region.h"
#include "tessera/placement/layout.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/styles/blocks.h"

// Trains with parameters that are sharded over the data dimension too, against one process. Meshes are {dp, tp}.
namespace tessera::testing {

// The gradient of a key's bias is zero except for rounding: it shifts all scores of a row equally.
inline const Rows kKeyBias = {"wk.bias"};
inline const ParallelizeOptions kZero = {.data_placement = Shard(0)};

// Returns this rank's piece of the batch.
inline at::Tensor piece(const at::Tensor& x, const DeviceMesh& mesh) {
  const Placements placements = {Shard(0), Replicate()};
  const Tile tile = local_tile(x.sizes(), placements, mesh.mesh().shape(), *mesh.coordinate());
  FromLocalOptions options;
  options.shape = x.sizes().vec();
  return from_local(Region(tile, x.sizes().vec()).read(x.detach()).contiguous(), mesh, placements, options);
}

// Says what runs under Strict: everything except what a rule of the model's own operators must communicate.
enum class Under { kNothing, kStrictForward, kStrict };

// Makes three steps of both, and compares outputs, gradients and parameters after each.
template <class Optimizer, class Make, class Options>
void train(const Make& make, const ParallelPlan& plan, const at::Tensor& x, const DeviceMesh& mesh,
           const Options& options, Under under, const Rows& except = kKeyBias) {
  auto reference = make(), module = make();
  auto zero = parallelize_module(module, mesh, plan, kZero);
  for (const auto& item : module->named_parameters()) {
    CAPTURE(item.key());
    CHECK(placements_of(item.value())[0].is_shard(0));
  }
  Optimizer ours(module->parameters(), options), theirs(reference->parameters(), options);
  for (int i = 0; i < 3; ++i) {
    CAPTURE(i);
    ours.zero_grad();
    theirs.zero_grad();
    const at::Tensor want = reference->forward(x);
    want.square().mean().backward();
    std::optional<Strict> strict(std::in_place, under != Under::kNothing);
    const at::Tensor got = zero(piece(x, mesh));
    CHECK(difference(got, want) <= 1e-11);
    if (under != Under::kStrict) strict.reset();
    got.square().mean().backward();
    strict.reset();
    for (const auto& item : module->named_parameters()) {
      CAPTURE(item.key());
      CHECK(placements_of(item.value().grad()) == placements_of(item.value()));
    }
    check_parameters(*module, *reference, /*gradients=*/true, 1e-11, except);
    ours.step();
    theirs.step();
    check_parameters(*module, *reference, /*gradients=*/false, 1e-11, except);
  }
}

}  // namespace tessera::testing
