#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/world.h"

namespace tessera {

// Seeds every random operator and factory on DTensors of this world. What the k-th of them after this call draws for an
// element depends only on (seed, k, the element's position in the global tensor): it is the same on any mesh and with
// any sharding, and the same on CPU and CUDA up to rounding. The numbers are not torch's. Every rank of the tensor's
// mesh must make the same calls in the same order, and must have made the same number of them on other meshes: after a
// draw on a mesh of some ranks, such as an evaluation on rank 0, set World::random_state() back there.
//
// So tensors on two meshes get the same numbers where seed and k are the same, as in two stages of a pipeline that seed
// alike. Give each stage a seed of its own, alike on the stage's ranks.
//
// All this holds for uniform, normal, bernoulli, dropout, random (randint), exponential, log_normal, geometric and
// cauchy. Other operators (multinomial, randperm) run replicated, from a LibTorch generator whose seed is made of
// (seed, k). If the caller passes a generator, each call takes one number of 64 bits from it, in place of (seed, k): it
// must be in the same state on every rank of the mesh, and ranks that are threads must not share one.
//
// Without a call of manual_seed the seed is a constant. torch::manual_seed seeds plain tensors only.
// To save and restore the state, read and write World::random_state(): a recomputation in backward sets the state from
// before forward, runs forward again, and restores the state. Does not communicate.
void manual_seed(uint64_t seed, World& world);
// Does the same in the world of `mesh`.
void manual_seed(uint64_t seed, const DeviceMesh& mesh);

// Lets a CUDA graph hold operators that draw random numbers on DTensors, such as dropout. While draws are recorded,
// they are numbered from a number on the device, which before_replay() sets, so that each replay draws what the same
// calls would draw if they were made in its place.
// Make it after the steps of warm-up and before the graph's capture_begin(), call end() after capture_end(), and
// before_replay() before each replay(). What computes the same numbers again, such as the backward of attention with
// dropout and a checkpoint of activations, must be in the same graph.
//
// Keep it as long as the graph. The graph holds the seed: after manual_seed or load_training_state capture it again. A
// draw that the kernels of gpu_kernels/ cannot make, or from a caller's generator, throws std::runtime_error while it
// is recorded. Does not communicate; every rank makes the same calls.
class CapturedDraws {
 public:
  // Throws std::invalid_argument when `device` is no GPU, and std::logic_error when the world records draws already.
  CapturedDraws(World& world, c10::Device device);
  ~CapturedDraws();
  CapturedDraws(const CapturedDraws&) = delete;
  CapturedDraws& operator=(const CapturedDraws&) = delete;

  // Ends the recording; the world then goes on where it was before. A second call does nothing.
  void end();
  // Numbers the draws of the next replay from the world's counter, and advances that by as many. Queues its work on the
  // current stream, and does not wait. Throws std::logic_error before end(), while the world records the draws of
  // another graph, and when the world's seed is another one.
  void before_replay();

 private:
  World& world_;
  at::Tensor base_;  // int64, a number
  RandomState before_;
  uint64_t count_ = 0;
  bool records_ = true;
  bool was_seeded_ = false;  // while draws were recorded
};

}  // namespace tessera
