#pragma once

#include <concepts>
#include <cstddef>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

struct CheckpointOptions {
  // Saves only this rank's part of the first input, of mesh.size() equal parts, and gathers it in backward with one
  // all_gather. The input must be a plain tensor that is the same on all ranks, with a multiple of mesh.size()
  // elements.
  bool distribute_saved_activations = false;
  // Is a 1-D mesh, needed to distribute.
  std::optional<DeviceMesh> mesh = {};
};

// Returns function(inputs) and keeps only the inputs for backward, which computes the intermediate results again.
// Inputs may be undefined, plain or DTensors; the caller's tensors are not changed.
//
// For the second computation all random state is set back to what it was in forward: the CPU's default generator, those
// of the inputs' CUDA devices, the streams of rng_tracker() (also within a fork), and the random state of every World
// from which `function` drew numbers for DTensors. Afterwards, and when it throws, the state is again what backward
// found. Autocast and ImplicitReplication are as they were in forward, too. Default generators and streams belong to
// the process: ranks that are threads of one process share them, so their `function` must not draw random numbers for
// plain tensors.
//
// Gradients of leaves that `function` captures, such as parameters, are added to their .grad. Capture a parameter
// rather than pass it: the gradient of one that is passed is reduced at once, by a collective of its own on every rank,
// and again in its bucket. Pass what other operators have computed, such as an encoder's output, rather than capture
// it: backward runs through its graph within each checkpoint that has captured it, and can do so only once.
//
// Collectives: those of `function`, again in backward, and the all_gather above.
// Throws std::invalid_argument, on every rank, on an input that cannot be distributed. Backward throws
// std::runtime_error when it was asked for gradients of chosen tensors (torch::autograd::grad, or backward with
// inputs), since it would add to .grad of others; with create_graph; when it runs a second time, as for any graph that
// was freed; and for the second use of a captured tensor that has a graph.
// Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (2016).
using CheckpointFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;
std::vector<at::Tensor> checkpoint(const CheckpointFunction& function, const std::vector<at::Tensor>& inputs,
                                   const CheckpointOptions& options = {});

// Does the same for a function that takes tensors and returns one:
//   x = checkpoint([&](const at::Tensor& h) { return block->forward(h); }, x);
template <class Function, class... Tensors>
requires(sizeof...(Tensors) > 0 && (std::convertible_to<const Tensors&, const at::Tensor&> && ...) &&
         std::is_same_v<std::remove_cvref_t<std::invoke_result_t<Function&, const Tensors&...>>, at::Tensor>) at::Tensor
    checkpoint(Function function, const Tensors&... inputs) {
  auto call = [function = std::move(function)]<std::size_t... I>(const std::vector<at::Tensor>& given,
                                                                 std::index_sequence<I...>) mutable {
    return std::vector<at::Tensor>{function(given[I]...)};
  };
  return checkpoint(
      [call = std::move(call)](const std::vector<at::Tensor>& given) mutable {
        return call(given, std::index_sequence_for<Tensors...>());
      },
      std::vector<at::Tensor>{inputs...})[0];
}

}  // namespace tessera
