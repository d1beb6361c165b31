#include "tessera/tests/layers/checkpointed.h"

#include <ATen/ATen.h>

#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"

namespace tessera::testing {

std::vector<at::Tensor> run_checkpointed(bool checkpointed, const CheckpointOptions& options) {
  using Tensors = std::vector<at::Tensor>;
  const at::Tensor x = leaf(sample({4, 6}, 1)), y = leaf(sample({4, 6}, 2)), w = leaf(sample({6, 6}, 3));
  at::manual_seed(7);
  const CheckpointFunction function = [w](const Tensors& in) -> Tensors {
    const at::Tensor hidden = at::dropout(at::tanh(at::matmul(in[0], w)), 0.4, true);
    return {hidden * in[1], hidden.sum()};
  };
  const Tensors out = checkpointed ? checkpoint(function, {x, y}, options) : function({x, y});
  const at::Tensor after_forward = at::rand({3}, on(at::kFloat));
  (out[0].pow(2).sum() + out[1]).backward();
  return {out[0].detach(), out[1].detach(), after_forward, x.grad(), y.grad(), w.grad(), at::rand({3}, on(at::kFloat))};
}

}  // namespace tessera::testing
