// The first program of docs/getting-started.md.

#include <iostream>

#include <torch/torch.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/device_mesh.h"

int main() {
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {4}, {"tp"});
  const bool is_first = mesh.world().rank() == 0;

  const at::Tensor x = torch::arange(20.0).view({10, 2});
  const at::Tensor rows = tessera::distribute_tensor(x, mesh, {tessera::Shard(0)});
  const at::Tensor total = rows.square().sum();  // of this rank's rows: a term of a sum that is pending
  if (is_first) std::cout << tessera::to_string(rows) << '\n' << tessera::to_string(total) << '\n';

  const double value = total.item<double>();  // one all-reduce: every rank calls it
  if (is_first) std::cout << value << std::endl;
}
