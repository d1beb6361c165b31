#pragma once

#include <functional>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

struct CheckpointOptions {
  // Saves of the first input this rank's part of mesh.size() equal ones, and gathers it in backward: one all_gather of
  // that part. The input is a plain tensor that all ranks have alike, and its elements are a multiple of mesh.size().
  bool distribute_saved_activations = false;
  // Of one dimension; needed to distribute, and to restore the draws of DTensors where no input is one.
  std::optional<DeviceMesh> mesh;
};

// function(inputs), of which backward sees the inputs alone: what is between is computed again there. Inputs may be
// undefined, plain or DTensors; the caller's tensors are left as they are. While it is computed again, the CPU's
// default generator, those of the inputs' CUDA devices, the streams of rng_tracker(), also within a fork of one, and
// the draws of DTensors on the worlds of the inputs and of options.mesh stand where they stood in forward; afterwards,
// and when it throws, where backward found them. Default generators and streams are the process's: ranks that are
// threads of one process draw in each other's turn, so their `function` must draw no plain numbers. Autocast is as it
// was. Gradients of what `function` holds, such as parameters, are added to their .grad.
//
// Collectives: those of `function`, once more in backward, and the all_gather above.
// Throws std::invalid_argument, alike on every rank, on an input that cannot be distributed; std::runtime_error in a
// backward that was asked for single gradients (torch::autograd::grad, or backward with inputs), which would add to
// .grad what nobody asked for, in one with create_graph, and in a second one, as of any graph that was freed.
// Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (2016).
using CheckpointFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;
std::vector<at::Tensor> checkpoint(const CheckpointFunction& function, const std::vector<at::Tensor>& inputs,
                                   const CheckpointOptions& options = {});

}  // namespace tessera
