// Tests that recurrent modules run by cuDNN on a GPU.

#include <memory>
#include <string>

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <doctest/doctest.h>
#include <torch/nn/modules/rnn.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/tp_line.h"

using namespace tessera;
using namespace tessera::testing;

TESSERA_RANKS_TEST_CASE("an LSTM whose batch is cut runs by cuDNN, forward and backward", {1, 2}) {
  static thread_local int forward = 0, backward = 0;  // backward runs on the rank's thread too
  forward = backward = 0;
  const DeviceMesh mesh = tp_line();
  torch::nn::LSTM lstm(8, 16);
  lstm->to(device());
  auto parallel = parallelize_module(lstm, mesh, {});
  const auto count = [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
    const std::string name = function.name();
    forward += name == "aten::_cudnn_rnn" ? 1 : 0;
    backward += name == "aten::_cudnn_rnn_backward" ? 1 : 0;
    return nullptr;
  };
  const at::CallbackHandle handle =
      at::addGlobalCallback(at::RecordFunctionCallback(count).scopes({at::RecordScope::FUNCTION}));
  const at::Tensor x = distribute_tensor(at::ones({5, 4, 8}, on(at::kFloat)), mesh, {Shard(1)}, kNoSource);
  std::get<0>(parallel(x)).sum().backward();
  at::removeCallback(handle);
  CHECK(forward > 0);
  CHECK(backward > 0);
}
