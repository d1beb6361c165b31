#pragma once

#include <functional>

#include <ATen/core/Tensor.h>

#include "tessera/layers/init_type.h"
#include "tessera/layers/parallel_linear.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

// Gives the tests of other libraries' names what one process computes.
namespace tessera::testing {

// Returns a mesh of one rank, whatever the number of ranks of the test.
DeviceMesh alone();

// Seeds the random numbers of DTensors on `mesh`, always by the same seed.
void begin_draws(const DeviceMesh& mesh);

// Returns the whole weight, in float64, that `method` gives right after begin_draws.
at::Tensor first_values(const InitMethod& method, at::IntArrayRef sizes, const DeviceMesh& mesh = alone(),
                        const Placement& placement = Replicate());

// Returns a method that fills a weight with 0.25, as no type does.
InitMethod quarters();

// Returns a config of layers whose parameters are in float64.
ModelParallelConfig in_double();

// Runs `region` on this rank's tensor, and compares its result, and the gradient that `g` gives, with the wanted ones.
void check_region(const std::function<at::Tensor(const at::Tensor&)>& region, const at::Tensor& mine,
                  const at::Tensor& want, const at::Tensor& g, const at::Tensor& gradient);

}  // namespace tessera::testing
