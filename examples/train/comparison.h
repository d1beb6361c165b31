#pragma once

#include <optional>
#include <vector>

#include "tessera/examples/train/options.h"
#include "tessera/examples/train/windows.h"
#include "tessera/mesh/device_mesh.h"

namespace train {

// Returns the losses of the first options.check_steps steps in float64, of a new model: on a mesh, or, without one, in
// LibTorch alone.
std::vector<double> losses_of(const Options& options, const Windows& windows,
                              const std::optional<tessera::DeviceMesh>& mesh);

struct Comparison {
  double with_dropout = 0;     // the largest difference from this program on one rank
  double without_dropout = 0;  // the largest difference from LibTorch alone, without dropout

  double largest() const { return with_dropout > without_dropout ? with_dropout : without_dropout; }
};

// Compares the losses of the mesh with those of one process, which the mesh's first rank computes; all ranks call it.
// Batches are small, and the result is that rank's alone.
Comparison compare_with_one_process(Options options, const Windows& windows, const tessera::DeviceMesh& mesh);

}  // namespace train
