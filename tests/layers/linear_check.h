#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/layers/parallel_linear.h"
#include "tessera/mesh/device_mesh.h"

// Compares the named linear layers with at::linear of the same parameters in one process.
namespace tessera::testing {

struct LinearRun {
  // The collectives on several ranks, as counted() writes them; on one rank there are none.
  std::string forward, backward;
  std::vector<int64_t> batch = {8, 3};  // the sizes of the whole input before its features; begins with the sequence
};

// Makes a layer of these options, gives biases and adapters values other than 0, runs it forward and backward, with
// plain tensors and with DTensors, and checks sizes, layouts, results, gradients and collectives. A skipped bias is
// added to the output.
void check_columns(const ColumnParallelOptions& options, const DeviceMesh& mesh, const LinearRun& run);
void check_rows(const RowParallelOptions& options, const DeviceMesh& mesh, const LinearRun& run);

// Gives the bias and the adapter of a layer values other than their first, 0.
void stir(const ParallelLinearBase& layer);

}  // namespace tessera::testing
