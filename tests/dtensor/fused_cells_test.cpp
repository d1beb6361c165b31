// Tests the cells of recurrent layers that a GPU computes by one kernel, on DTensors of many layouts against plain
// tensors. LibTorch has them for GPUs alone, so this file has them for the CPU, by the same formulas.

#include <optional>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/library.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/op_check.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

using Optional = std::optional<at::Tensor>;

at::Tensor plus(const at::Tensor& gates, const Optional& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& of_input, const at::Tensor& of_state,
                                            const at::Tensor& hx, const Optional& input_bias,
                                            const Optional& state_bias) {
  const std::vector<at::Tensor> i = plus(of_input, input_bias).chunk(3, 1), h = plus(of_state, state_bias).chunk(3, 1);
  const at::Tensor reset = (i[0] + h[0]).sigmoid(), update = (i[1] + h[1]).sigmoid();
  const at::Tensor fresh = (i[2] + reset * h[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, h[2]}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(const at::Tensor& grad,
                                                                                         const at::Tensor& workspace,
                                                                                         bool has_bias) {
  const std::vector<at::Tensor> w = workspace.chunk(5, 1);
  const at::Tensor &reset = w[0], &update = w[1], &fresh = w[2], &hx = w[3], &of_state = w[4];
  const at::Tensor of_update = grad * (hx - fresh) * (1 - update) * update;
  const at::Tensor of_fresh = grad * (1 - update) * (1 - fresh * fresh);
  const at::Tensor of_reset = of_fresh * of_state * (1 - reset) * reset;
  const at::Tensor input = at::cat({of_reset, of_update, of_fresh}, 1);
  const at::Tensor state = at::cat({of_reset, of_update, of_fresh * reset}, 1);
  const auto bias = [&](const at::Tensor& gates) { return has_bias ? gates.sum(0) : at::Tensor(); };
  return {input, state, grad * update, bias(input), bias(state)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& of_input, const at::Tensor& of_state,
                                                         const at::Tensor& cx, const Optional& input_bias,
                                                         const Optional& state_bias) {
  const std::vector<at::Tensor> g = (plus(of_input, input_bias) + plus(of_state, state_bias)).chunk(4, 1);
  const at::Tensor in = g[0].sigmoid(), forget = g[1].sigmoid(), cell = g[2].tanh(), out = g[3].sigmoid();
  const at::Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const Optional& grad_hy, const Optional& grad_cy,
                                                                  const at::Tensor& cx, const at::Tensor& cy,
                                                                  const at::Tensor& workspace, bool has_bias) {
  const std::vector<at::Tensor> w = workspace.chunk(4, 1);
  const at::Tensor &in = w[0], &forget = w[1], &cell = w[2], &out = w[3];
  const auto given = [&](const Optional& grad) { return grad && grad->defined() ? *grad : at::zeros_like(cx); };
  const at::Tensor of_state = given(grad_hy), tanh = cy.tanh();
  const at::Tensor of_cell = of_state * out * (1 - tanh * tanh) + given(grad_cy);
  const at::Tensor gates = at::cat({of_cell * cell * (1 - in) * in, of_cell * cx * (1 - forget) * forget,
                                    of_cell * in * (1 - cell * cell), of_state * tanh * (1 - out) * out},
                                   1);
  return {gates, of_cell * forget, has_bias ? gates.sum(0) : at::Tensor()};
}

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
}

at::Tensor gru(const Tensors& x, const Optional& first, const Optional& second) {
  return std::get<0>(at::_thnn_fused_gru_cell(x[0], x[1], x[2], first, second));
}
Tensors lstm(const Tensors& x, const Optional& first, const Optional& second) {
  const auto [state, cell, workspace] = at::_thnn_fused_lstm_cell(x[0], x[1], x[2], first, second);
  return {state, cell};
}

}  // namespace

TESSERA_RANKS_TEST_CASE("fused cells of recurrent layers give what they give in one process", {1, 2, 3, 4}) {
  std::vector<OpCase> cases;
  for (const int64_t batch : {5, 2}) {
    const Tensors of_gru = {sample({batch, 9}), sample({batch, 9}, 1), sample({batch, 3}, 2), sample({9}, 3),
                            sample({9}, 4)};
    const Tensors of_lstm = {sample({batch, 12}), sample({batch, 12}, 1), sample({batch, 3}, 2), sample({12}, 3),
                             sample({12}, 4)};
    cases.push_back(op_case("gru", of_gru, [](const Tensors& x) { return gru(x, x[3], x[4]); }));
    cases.push_back(op_case("lstm", of_lstm, [](const Tensors& x) { return lstm(x, x[3], x[4]); }));
    cases.push_back(op_case("gru without biases", {of_gru[0], of_gru[1], of_gru[2]},
                            [](const Tensors& x) { return gru(x, {}, {}); }));
    cases.push_back(op_case("lstm without biases, whose state alone is used", {of_lstm[0], of_lstm[1], of_lstm[2]},
                            [](const Tensors& x) { return lstm(x, {}, {})[0]; }));
  }
  check_ops(cases);
}

TESSERA_RANKS_TEST_CASE("fused cells communicate nothing where the batch is cut", {2, 3}) {
  const DeviceMesh mesh = line();
  const auto cut = [&](at::IntArrayRef sizes, int64_t seed) {
    return leaf(spread(sample(sizes, seed), mesh, {Shard(0)}));
  };
  const auto whole = [&](at::IntArrayRef sizes, int64_t seed) {
    return leaf(spread(sample(sizes, seed), mesh, {Replicate()}));
  };
  CommCounter counter(mesh);
  const Strict strict;
  const Tensors of_gru = {cut({5, 9}, 0), cut({5, 9}, 1), cut({5, 3}, 2), whole({9}, 3), whole({9}, 4)};
  const Tensors of_lstm = {cut({5, 12}, 0), cut({5, 12}, 1), cut({5, 3}, 2), whole({12}, 3), whole({12}, 4)};
  const at::Tensor state = gru(of_gru, of_gru[3], of_gru[4]);
  const Tensors states = lstm(of_lstm, of_lstm[3], of_lstm[4]);
  CHECK(placements_of(state) == Placements{Shard(0)});
  CHECK(placements_of(states[1]) == Placements{Shard(0)});
  CHECK(counter.total() == 0);
  state.backward(spread(sample({5, 3}), mesh, {Shard(0)}));
  CHECK(counter.total() == 2);  // the gradients of two biases are added up where they arrive
  states[1].backward(spread(sample({5, 3}), mesh, {Shard(0)}));
  CHECK(counter.total() == 4);
  CHECK(placements_of(of_gru[0].grad()) == Placements{Shard(0)});
  CHECK(placements_of(of_lstm[2].grad()) == Placements{Shard(0)});
}

TESSERA_RANKS_TEST_CASE("fused cells refuse batches that do not fit, on every rank alike", {2}) {
  const DeviceMesh mesh = line();
  const auto cut = [&](at::IntArrayRef sizes) { return spread(sample(sizes), mesh, {Shard(0)}); };
  const char* const other_rows =
      "size of tensor a (5) must match the size of tensor b (4) at non-singleton dimension 0";
  CHECK_THROWS_WITH_AS(gru({cut({5, 9}), cut({4, 9}), cut({5, 3})}, {}, {}), doctest::Contains(other_rows), c10::Error);
  CHECK_THROWS_WITH_AS(gru({cut({9}), cut({9}), cut({3})}, {}, {}), doctest::Contains("Dimension out of range"),
                       c10::Error);
  CHECK_THROWS_WITH_AS(lstm({cut({5, 12}), cut({5, 12}), cut({4, 3})}, {}, {}), doctest::Contains(other_rows),
                       c10::Error);
}
