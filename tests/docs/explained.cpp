// Prints what docs/redistribution.md shows: a plan and its costs, for four ranks of a fake world.

#include <iostream>

#include <torch/torch.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/explain.h"
#include "tessera/mesh/device_mesh.h"

int main() {
  const auto world = tessera::World::fake(/*rank=*/0, /*size=*/4);
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world);
  const at::Tensor t = tessera::distribute_tensor(torch::ones({64, 64}), mesh, {tessera::Shard(0), tessera::Shard(1)},
                                                  tessera::kNoSource);
  std::cout << tessera::explain(t, {tessera::Shard(1), tessera::Shard(0)});
}
