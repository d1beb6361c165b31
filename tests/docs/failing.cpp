// A program of which rank 2 is lost, for docs/reliability.md, which shows what is then on the screen.

#include <csignal>
#include <exception>
#include <iostream>

#include <torch/torch.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/device_mesh.h"

int main() {
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {4}, {"tp"});
  const int64_t rank = mesh.world().rank();
  try {
    const at::Tensor rows = tessera::distribute_tensor(torch::arange(20.0), mesh, {tessera::Shard(0)});
    (void)rows.sum().item<double>();
    if (rank == 2) (void)std::raise(SIGKILL);
    (void)rows.sum().item<double>();
    return 0;
  } catch (const std::exception& error) {
    if (rank == 0) std::cerr << error.what() << std::endl;  // each rank has such an error; one is enough for the page
    return 1;
  }
}
