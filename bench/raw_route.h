#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/plan.h"

namespace tessera::bench {

// Implements one plan as one would write it by hand, for float32 tensors, Shards and sums on the CPU: with c10d's own
// calls, and one copy where the layout requires packing or unpacking. All buffers, including results, are kept between
// calls.
class RawRoute {
 public:
  RawRoute(const Plan& plan, const DeviceMesh& mesh);
  at::Tensor run(const at::Tensor& local) const;

  class Step {
   public:
    virtual ~Step() = default;
    virtual at::Tensor run(const at::Tensor& piece) const = 0;
  };

 private:
  std::vector<std::unique_ptr<const Step>> steps_;
};

}  // namespace tessera::bench
