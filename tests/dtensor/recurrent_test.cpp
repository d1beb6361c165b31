// Recurrent layers and cells on a batch that is cut, beside one process: results, gradients, layouts and collectives.

#include <functional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn.h>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/dtensor/whole_value.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;
using Tensors = std::vector<at::Tensor>;

namespace {

constexpr int64_t kSteps = 3, kBatch = 6, kFeatures = 4, kHidden = 3;

// A layer or a cell: its input, its states, where their batch lies, and what it gives.
struct Case {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
  std::vector<int64_t> input;
  int64_t batch;  // dimension of the input
  Tensors states;
  std::function<Tensors(const at::Tensor& x, const Tensors& states)> forward;

  int64_t batch_of_state() const { return static_cast<int64_t>(states[0].dim()) - 2; }
};

template <class M>
Tensors results_of(M& m, const at::Tensor& x, const Tensors& states) {
  using Module = typename M::ContainedType;
  if constexpr (std::is_same_v<Module, torch::nn::LSTMImpl> || std::is_same_v<Module, torch::nn::LSTMCellImpl>) {
    const auto state = states.empty() ? std::nullopt : std::optional(std::make_tuple(states[0], states[1]));
    if constexpr (std::is_same_v<Module, torch::nn::LSTMImpl>) {
      const auto [out, last] = m->forward(x, state);
      return {out, std::get<0>(last), std::get<1>(last)};
    } else {
      const auto [hidden, cell] = m->forward(x, state);
      return {hidden, cell};
    }
  } else {
    const at::Tensor state = states.empty() ? at::Tensor() : states[0];
    if constexpr (std::is_same_v<Module, torch::nn::RNNImpl> || std::is_same_v<Module, torch::nn::GRUImpl>) {
      const auto [out, last] = m->forward(x, state);
      return {out, last};
    } else {
      return {m->forward(x, state)};
    }
  }
}

template <class M>
Case layer(const std::string& name, M m, bool batch_first = false, int64_t cells = 1, int64_t projected = kHidden) {
  Tensors states = {sample({cells, kBatch, projected}, 1)};
  if (name.starts_with("LSTM")) states.push_back(sample({cells, kBatch, kHidden}, 2));
  return {.name = name,
          .module = m.ptr(),
          .input = batch_first ? std::vector<int64_t>{kBatch, kSteps, kFeatures}
                               : std::vector<int64_t>{kSteps, kBatch, kFeatures},
          .batch = batch_first ? 0 : 1,
          .states = states,
          .forward = [m](const at::Tensor& x, const Tensors& s) mutable { return results_of(m, x, s); }};
}

template <class M>
Case cell(const std::string& name, M m) {
  Tensors states = {sample({kBatch, kHidden}, 1)};
  if (name.starts_with("LSTM")) states.push_back(sample({kBatch, kHidden}, 2));
  return {.name = name,
          .module = m.ptr(),
          .input = {kBatch, kFeatures},
          .batch = 0,
          .states = states,
          .forward = [m](const at::Tensor& x, const Tensors& s) mutable { return results_of(m, x, s); }};
}

std::vector<Case> cases() {
  using namespace torch::nn;
  return {
      layer("LSTM", LSTM(kFeatures, kHidden)),
      layer("LSTM of two layers, both ways", LSTM(LSTMOptions(kFeatures, kHidden).num_layers(2).bidirectional(true)),
            false, 4),
      layer("LSTM without bias, batch first", LSTM(LSTMOptions(kFeatures, kHidden).bias(false).batch_first(true)),
            true),
      layer("LSTM with projections", LSTM(LSTMOptions(kFeatures, kHidden).proj_size(2)), false, 1, 2),
      layer("GRU", GRU(kFeatures, kHidden)),
      layer("GRU of two layers, both ways, batch first",
            GRU(GRUOptions(kFeatures, kHidden).num_layers(2).bidirectional(true).batch_first(true)), true, 4),
      layer("RNN", RNN(kFeatures, kHidden)),
      layer("RNN of rectified numbers, both ways",
            RNN(RNNOptions(kFeatures, kHidden).nonlinearity(torch::kReLU).bidirectional(true)), false, 2),
      cell("LSTMCell", LSTMCell(kFeatures, kHidden)),
      cell("GRUCell", GRUCell(kFeatures, kHidden)),
      cell("RNNCell", RNNCell(kFeatures, kHidden)),
  };
}

at::Tensor loss_of(const Tensors& results) {
  at::Tensor loss;
  for (std::size_t k = 0; k < results.size(); ++k) {
    const at::Tensor part =
        (results[k] * sample(results[k].sizes(), 5 + static_cast<int64_t>(k)).to(results[k].dtype())).sum();
    loss = loss.defined() ? loss + part : part;
  }
  return loss;
}

struct Outcome {
  Tensors results;
  Tensors gradients;  // of the input, the states, the parameters
};

Outcome run(const Case& c, const at::Tensor& x, const Tensors& states) {
  for (at::Tensor& p : c.module->parameters()) p.mutable_grad().reset();
  Outcome out{.results = c.forward(x, states), .gradients = {}};
  loss_of(out.results).backward();
  out.gradients.push_back(x.grad());
  for (const at::Tensor& s : states) out.gradients.push_back(s.grad());
  for (const at::Tensor& p : c.module->parameters()) out.gradients.push_back(p.grad().clone());
  return out;
}

// `of_states`: how the states lie; nullopt for none, which are zeros then.
void check(const Case& c, at::ScalarType type, const std::optional<Placement>& of_states, bool parameters_plain) {
  CAPTURE(fmt::format("{} of {}, states {}, parameters {}", c.name, c10::toString(type),
                      of_states ? to_string(*of_states) : "none", parameters_plain ? "plain" : "replicated"));
  const DeviceMesh mesh = line();
  c.module->to(device(), type);
  const double tolerance = type == at::kFloat ? 1e-5 : 1e-12;
  const at::Tensor x = sample(c.input, 0, type);
  Tensors plain_states, states;
  for (const at::Tensor& s : c.states) {
    if (!of_states) break;
    plain_states.push_back(leaf(s.to(type)));
    states.push_back(leaf(spread(s.to(type), mesh, {*of_states})));
  }
  const Outcome want = run(c, leaf(x), plain_states);
  if (!parameters_plain) {
    for (const at::Tensor& p : c.module->parameters()) distribute_in_place(p, mesh, {Replicate()}, kNoSource);
  }
  const at::Tensor cut = leaf(spread(x, mesh, {Shard(c.batch)}));
  const ImplicitReplication replicated;
  {
    CommCounter counter(mesh);
    const Tensors results = c.forward(cut, states);
    CHECK(counter.total() == 0);
    CHECK(placements_of(results[0]) == Placements{Shard(c.batch)});
    for (std::size_t k = 1; k < results.size(); ++k) {
      CHECK(placements_of(results[k]) == Placements{Shard(results[k].dim() - 2)});
    }
  }
  const Outcome got = run(c, cut, states);
  for (std::size_t k = 0; k < want.results.size(); ++k) {
    CHECK(close(whole_value(got.results[k]), want.results[k].detach(), tolerance));
  }
  for (std::size_t k = 0; k < want.gradients.size(); ++k) {
    CHECK(close(whole_value(got.gradients[k]), want.gradients[k], tolerance));
  }
}

}  // namespace

TESSERA_RANKS_TEST_CASE("recurrent layers keep a batch cut, without communication in forward", {1, 2, 3, 4}) {
  for (std::size_t k = 0; k < cases().size(); ++k) {
    for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
      for (const bool plain : {true, false}) {
        torch::manual_seed(1);
        const Case none = cases()[k], cut = cases()[k], replicated = cases()[k];
        check(none, type, std::nullopt, plain);
        check(cut, type, Shard(cut.batch_of_state()), plain);
        check(replicated, type, Replicate(), plain);
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("a cell whose batch two mesh dimensions cut together takes a state of any layout", {4}) {
  const DeviceMesh mesh = mesh_over({2, 2});
  const at::Tensor x = sample({4, 5, kFeatures}), state = sample({20, kHidden}, 1);
  const at::Tensor of_input = sample({3 * kHidden, kFeatures}, 2), of_state = sample({3 * kHidden, kHidden}, 3);
  const at::Tensor want = at::gru_cell(x.flatten(0, 1), state, of_input, of_state);
  const auto whole = [&](const at::Tensor& t) { return spread(t, mesh, {Replicate(), Replicate()}); };
  for (const Placements& layout : all_layouts(2, {Replicate(), Shard(0), Shard(1)})) {
    CAPTURE(to_string(layout));
    const at::Tensor rows = spread(x, mesh, {Shard(0), Shard(1)}).flatten(0, 1);
    const at::Tensor got = at::gru_cell(rows, spread(state, mesh, layout), whole(of_input), whole(of_state));
    CHECK(close(full_tensor(got), want));
  }
}
