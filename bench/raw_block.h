#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/bench/block.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::bench {

// Implements the block as one would write it by hand for tensor-parallel ranks: with plain LibTorch and c10d's own
// all-reduces, two in forward and two in backward. Those of backward run while the weight's gradient is computed.
class RawBlock {
 public:
  RawBlock(const BlockSize& size, const DeviceMesh& mesh);
  at::Tensor forward(const at::Tensor& x) const;
  // Returns this rank's pieces, in the order of block_parameters().
  const std::vector<at::Tensor>& parameters() const { return parameters_; }

 private:
  at::Tensor norm(const at::Tensor& x, std::size_t first) const;

  const BlockSize size_;
  const DeviceMesh mesh_;
  std::vector<at::Tensor> parameters_;
};

}  // namespace tessera::bench
