#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/core/spec.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

// This file checks what from_local and to_local are given.
namespace tessera::detail {

// Describes the DTensor that from_local makes, and says how the piece's gradient is laid out if the caller does.
struct LocalLayouts {
  SpecPtr spec;
  std::optional<Placements> gradient;
};

// Returns the layouts that from_local's arguments ask for. Throws std::invalid_argument for arguments that do not fit;
// where the other ranks may see nothing wrong in theirs, the error fails the job too, unless all ranks compare
// (FromLocalOptions::check). Does not communicate.
LocalLayouts checked_layouts(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements,
                             const FromLocalOptions& options);

// Throws std::invalid_argument if the piece has other sizes than `spec` gives this rank. It fails the job too, since
// only this rank may see that.
void check_piece(const at::Tensor& local, const Spec& spec);

// Throws std::invalid_argument, alike on every rank, unless a gradient laid out as `gradient` has the sizes of its
// piece on each of them. `who` names the argument.
void check_gradient_layout(const Spec& spec, const Placements& gradient, const char* who);

}  // namespace tessera::detail
