#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

namespace tessera::testing {

using Tensors = std::vector<at::Tensor>;

// Runs `body` on ranks that are threads, one for each place on a mesh of that shape.
void on_mesh(const std::vector<int64_t>& shape, const std::function<void(const DeviceMesh&)>& body);
// On meshes of 1, 2, 3 and 4 ranks.
void on_lines(const std::function<void(const DeviceMesh&)>& body);

// "all_gather 1 all_reduce 2"; "-" for none.
std::string counts(const CommCounter& counter);

struct Operand {
  at::Tensor whole;
  Placements placements;
};

// What a call on DTensors gave, and the collectives of it and of its backward.
struct Ran {
  at::Tensor result;
  Tensors inputs;  // leaves, with their gradients
  std::string forward;
  std::string backward;
};

using Operator = std::function<at::Tensor(const Tensors&)>;

// Calls `f` on DTensors of the operands, laid out as they say, and on plain tensors; checks that values, dtype and
// sizes are alike, and so are the gradients of all floating operands where the result has one. A gradient lies as its
// operand does.
Ran beside_plain(const DeviceMesh& mesh, const std::vector<Operand>& operands, const Operator& f,
                 double tolerance = 1e-12);

// A leaf that gradients are asked of.
at::Tensor plain_leaf(const at::Tensor& whole);
at::Tensor leaf(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements);

}  // namespace tessera::testing
