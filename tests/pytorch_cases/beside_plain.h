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
// Runs `body` on meshes of 1, 2, 3 and 4 ranks.
void on_lines(const std::function<void(const DeviceMesh&)>& body);

// Returns "all_gather 1 all_reduce 2", or "-" for none.
std::string counts(const CommCounter& counter);

struct Operand {
  at::Tensor whole;
  Placements placements;
};

// The results of a call on DTensors, and the collectives of it and of its backward.
struct Ran {
  at::Tensor result;
  Tensors inputs;  // leaves, with their gradients
  std::string forward;
  std::string backward;
};

using Operator = std::function<at::Tensor(const Tensors&)>;

// Calls `f` on DTensors with the operands' layouts and on plain tensors, and checks that values, dtype and sizes are
// equal, and so are the gradients of all floating operands where the result has one. A gradient has its operand's
// layout.
Ran beside_plain(const DeviceMesh& mesh, const std::vector<Operand>& operands, const Operator& f,
                 double tolerance = 1e-12);

}  // namespace tessera::testing
