#pragma once

#include "tessera/dtensor/deferred/deferred.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera {

// While one lives, on its thread, a module's constructor makes parameters and buffers without memory, and the operators
// that fill them are recorded. parallelize_module, distribute_module and distribute_in_place, under the guard or after
// it, then carry them out straight on the pieces that each rank is to hold: a model larger than one process is built
// where it will lie. No communication, but for a parameter that views a tensor of another shape: its pieces are
// redistributed.
//
//   ShardedInit init(mesh);
//   MyModel model(options);                              // unmodified: LibTorch's modules, and modules of your own
//   auto tp = parallelize_module(model, mesh, plan);     // every rank makes its pieces
//
// Values. Every random operator is the next draw of the mesh's World (dtensor/random.h), in the order of the
// constructors, so an element's number depends on manual_seed's seed, on how many draws came before and on the
// element's place in the whole parameter. They are not those of torch::manual_seed. Bit by bit they are what the same
// constructors give with every parameter Replicate, on one rank or many, cut afterwards; and what the same operators
// give on DTensors (tessera::empty, then torch::nn::init) after manual_seed.
//
// Memory. No rank holds a whole sharded parameter, nor a temporary of its size. Where an operator would need one or
// would communicate (a norm over a sharded weight, torch::nn::init::orthogonal_ and sparse_) parallelize_module throws
// std::invalid_argument that names the operator and what to do, on every rank alike; parameters before it are converted
// then, so build the model anew.
//
// Under the guard a value cannot be read: item() and data pointers throw. Outside it, every operator on a tensor that
// parallelize_module has not converted throws. A plain tensor among the recorded arguments (one made before the guard)
// counts as replicated, and must not change before parallelize_module. All ranks build alike: modules, sizes, draws.
class ShardedInit {
 public:
  explicit ShardedInit(const DeviceMesh& mesh) : recording_(mesh.world_ptr()) {}

 private:
  detail::Recording recording_;
};

}  // namespace tessera
