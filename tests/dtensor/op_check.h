#pragma once

#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

namespace tessera::testing {

using Tensors = std::vector<at::Tensor>;

// An operator, or a few of them, on some inputs.
struct OpCase {
  std::string name;
  Tensors inputs;  // whole and plain; floating ones get gradients
  std::function<Tensors(const Tensors&)> op;
  std::vector<Placements> kinds = {};  // for each input, the placements to try; empty for all
  double tolerance = 1e-11;
};

// `f` takes a list of tensors and returns one tensor or a list.
template <class F>
OpCase op_case(std::string name, Tensors inputs, F f, std::vector<Placements> kinds = {}) {
  if constexpr (std::is_same_v<std::invoke_result_t<F, const Tensors&>, Tensors>) {
    return {.name = std::move(name), .inputs = std::move(inputs), .op = f, .kinds = std::move(kinds)};
  } else {
    const auto op = [f](const Tensors& x) { return Tensors{f(x)}; };
    return {.name = std::move(name), .inputs = std::move(inputs), .op = op, .kinds = std::move(kinds)};
  }
}

// Runs every case on DTensors of many layouts (all if they are few, else a seeded sample of `most`), on line() and,
// with four ranks, on {2, 2}. Compares the results, their dtypes, and the gradients of all inputs with those of plain
// tensors, and checks the gradients' layouts.
void check_ops(const std::vector<OpCase>& cases, std::size_t most = 10);

// Runs the call, and returns the kind and the bytes of each collective on the mesh: "all_gather 104 ".
std::string collectives_of(const DeviceMesh& mesh, const std::function<void()>& call);

}  // namespace tessera::testing
