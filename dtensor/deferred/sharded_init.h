#pragma once

#include "tessera/dtensor/deferred/deferred.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera {

// While a ShardedInit is alive, a module's constructor on this thread makes parameters and buffers without memory, and
// the operators that fill them are recorded. parallelize_module, distribute_module and distribute_in_place, under the
// guard or after it, then run these operators directly on the pieces that each rank will hold, so a model can be larger
// than one process. Nothing is communicated, except for a parameter that is a view of a tensor of another shape: its
// pieces are redistributed.
//
//   ShardedInit init(mesh);
//   MyModel model(options);                              // unmodified: LibTorch's modules, and modules of your own
//   auto tp = parallelize_module(model, mesh, plan);     // every rank makes its pieces
//
// Values: every random operator is the next draw of the mesh's World (dtensor/random.h), in the order of the
// constructors. So an element's number depends on manual_seed's seed, on the number of draws before, and on the
// element's position in the whole parameter; it is not the number that torch::manual_seed gives. What is drawn,
// filled, copied, added and multiplied is bit by bit what the same constructors give with every parameter Replicate, on
// one rank or many; and what the same operators give on DTensors (tessera::empty, then torch::nn::init) after
// manual_seed. Other functions, such as sigmoid, may differ in the last bit, since LibTorch computes the last elements
// of a piece by other instructions.
//
// Memory: no rank holds a whole sharded parameter, or a temporary of its size. Where an operator would need one or
// would communicate (a norm over a sharded weight, torch::nn::init::orthogonal_ and sparse_), parallelize_module throws
// std::invalid_argument, on every rank alike, that names the operator and what to do. Parameters before it are already
// converted then, so build the model again. An operator for which LibTorch has no kernel without values, such as polar,
// flip or roll, is run on zeros, or ones, once, for the sizes of its result: then a whole input and result exist for a
// moment. Where these sizes depend on values, as in nonzero, it throws std::invalid_argument.
//
// Under the guard no value can be read: item() and data pointers throw. After it, every operator but clone(), which
// gives another tensor without values, throws on a tensor that parallelize_module has not converted. A plain tensor
// among the recorded arguments (made before the guard) counts as replicated, and must not change before
// parallelize_module. Autocast does not act on what is recorded. `to(device)` gives the tensor itself, also where a
// module is cloned: give clone() no device, or the copy shares its parameters with the module. Every rank must build
// the same modules with the same sizes and draws in the same order.
class ShardedInit {
 public:
  explicit ShardedInit(const DeviceMesh& mesh) : recording_(mesh.world_ptr()) {}

 private:
  detail::Recording recording_;
};

}  // namespace tessera
