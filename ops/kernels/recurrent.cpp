// Recurrent layers and cells. LibTorch composes them of other operators, and writes values that come from some of their
// tensors into tensors that come from others. Plain tensors that count as replicated, such as a state of zeros that a
// module makes and its parameters, therefore become DTensors first, and states are cut as the batch is. They are
// differentiable.

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tanh.h>
#include <torch/library.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/core/tensor_lists.h"
#include "tessera/dtensor/dispatch/dispatcher.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/ops/kernels/arguments.h"
#include "tessera/placement/layout.h"

namespace tessera {
namespace {

using torch::jit::Stack;

// Makes plain tensors of numbers that are not whole replicated DTensors. Whole numbers are sizes, which these operators
// read.
void replicate_plain(const c10::OperatorHandle& op, Stack& stack) {
  const dispatch::OpTraits traits(op);
  const DeviceMesh mesh = dispatch::read_call(op, traits, stack).first_spec->mesh;
  if (!mesh.is_member()) return;
  const Placements replicated(static_cast<std::size_t>(mesh.ndim()), Replicate());
  for (std::size_t i = stack.size() - traits.num_args; i < stack.size(); ++i) {
    detail::replace_tensors(stack[i], [&](const at::Tensor& t, std::size_t) {
      const bool becomes = t.defined() && !is_dtensor(t) && t.dim() > 0 && t.is_floating_point();
      return becomes ? from_local(t, mesh, replicated) : t;
    });
  }
}

// Makes `batch_sizes` plain, since LibTorch reads the number of sequences per step from memory.
void make_batch_sizes_plain(const c10::OperatorHandle& op, Stack& stack) {
  const int at = argument(op, "batch_sizes");
  if (at < 0) return;
  at::IValue& sizes = stack[stack.size() - op.schema().arguments().size() + static_cast<std::size_t>(at)];
  if (is_dtensor(sizes.toTensor())) sizes = full_tensor(sizes.toTensor()).cpu();
}

// Returns the batch dimension of the input; nullopt if it is a single sequence, or packed.
std::optional<int64_t> batch_dim(const c10::OperatorHandle& op, const Stack& args) {
  const int input = argument(op, "input"), batch_first = argument(op, "batch_first");
  if (input < 0) return std::nullopt;
  const at::Tensor& x = args[static_cast<std::size_t>(input)].toTensor();
  if (batch_first < 0) return x.dim() == 2 ? std::optional<int64_t>(0) : std::nullopt;
  if (x.dim() != 3) return std::nullopt;
  return args[static_cast<std::size_t>(batch_first)].toBool() ? 0 : 1;
}

// Returns the placements of the input's batch as Shards of dimension 0 on the mesh dimensions that cut it; empty if
// none does.
Placements cuts_of_batch(const c10::OperatorHandle& op, const Stack& args) {
  const std::optional<int64_t> dim = batch_dim(op, args);
  const at::Tensor x = args[0].toTensor();
  if (!dim || !is_dtensor(x)) return {};
  Placements out = placements_of(x);
  bool any = false;
  for (Placement& p : out) {
    const bool cuts = p.is_shard() && p.tensor_dim() == *dim;
    p = cuts ? p.on(0) : Placement(Replicate());
    any |= cuts;
  }
  return any ? out : Placements();
}

// Cuts a state that is whole as the batch is cut, since LibTorch writes results of both into tensors that it made from
// the state.
void cut_states(const c10::OperatorHandle& op, Stack& stack) {
  const Placements cuts = cuts_of_batch(op, take_args(op, stack));
  if (cuts.empty()) return;
  at::IValue& states =
      stack[stack.size() - op.schema().arguments().size() + static_cast<std::size_t>(argument(op, "hx"))];
  detail::replace_tensors(states, [&](const at::Tensor& t, std::size_t) {
    if (!t.defined() || !is_dtensor(t) || t.dim() < 2) return t;
    Placements to = placements_of(t);
    for (std::size_t i = 0; i < to.size(); ++i) {
      if (to[i].is_replicate() && cuts[i].is_shard()) to[i] = cuts[i].on(t.dim() - 2);
    }
    if (!is_layout(to, mesh_of(t).mesh(), spec_of(t).sizes)) {  // the batch is cut by mesh dimensions that go together
      for (std::size_t i = 0; i < to.size(); ++i) {
        to[i] = cuts[i].is_shard() ? cuts[i].on(t.dim() - 2) : Placement(Replicate());
      }
    }
    return to == placements_of(t) ? t : redistribute(t, to);
  });
}

void prepare(const c10::OperatorHandle& op, Stack& stack) {
  if (ImplicitReplication::enabled()) replicate_plain(op, stack);
  make_batch_sizes_plain(op, stack);
  cut_states(op, stack);
}

void run_as_written(const c10::OperatorHandle& op, Stack& stack) {
  op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, stack);
}

// ---- On a GPU
//
// LibTorch gives a whole module to cuDNN, which needs the memory of its weights. So it runs on the pieces, where every
// rank has whole sequences and whole weights; elsewhere cuDNN is not used.

// Says whether each rank can run the module on its pieces: the batch alone is cut, and dropout draws nothing.
bool runs_on_pieces(const c10::OperatorHandle& op, const Stack& args) {
  const std::optional<int64_t> batch = batch_dim(op, args);
  const at::Tensor x = args[0].toTensor();
  if (!x.is_cuda() || !batch || x.dim() != 3 || !is_dtensor(x) || !mesh_of(x).is_member()) return false;
  if (x.numel() == 0 || (args[5].toDouble() > 0 && args[6].toBool())) return false;
  const Placement cut = Shard(*batch);
  for (const Placement& p : placements_of(x)) {
    if (!p.is_replicate() && !(p == cut)) return false;
  }
  const auto fits = [&](const at::Tensor& t, bool is_state) {
    if (!is_dtensor(t) || !(mesh_of(t) == mesh_of(x))) return false;
    for (std::size_t i = 0; i < placements_of(x).size(); ++i) {
      const bool cuts = is_state && !placements_of(x)[i].is_replicate();
      if (!(placements_of(t)[i] == (cuts ? Shard(1) : Replicate()))) return false;
    }
    return true;
  };
  const at::IValue& states = args[1];
  for (const at::Tensor& t : states.isTensor() ? std::vector{states.toTensor()} : states.toTensorVector()) {
    if (!fits(t, /*is_state=*/true)) return false;
  }
  const std::vector<at::Tensor> weights = args[2].toTensorVector();
  return std::ranges::all_of(weights, [&](const at::Tensor& t) { return fits(t, /*is_state=*/false); });
}

// cuDNN refuses a batch without sequences. Returns such a batch with a sequence of zeros.
at::Tensor with_one_sequence(const at::Tensor& piece, int64_t dim) {
  std::vector<int64_t> pad(static_cast<std::size_t>(2 * (piece.dim() - dim)), 0);
  pad.back() = 1;
  return at::constant_pad_nd(piece, pad, 0);
}

// Each rank's pieces of the results are those of its pieces of the batch. A weight's gradient is a term on each rank
// that has another part of the batch.
void run_on_pieces(const c10::OperatorHandle& op, Stack& stack) {
  const Stack args = take_args(op, stack);
  const at::Tensor x = args[0].toTensor();
  const DeviceMesh mesh = mesh_of(x);
  const Placements cuts = placements_of(x);
  Placements terms = cuts, of_states = cuts;
  for (std::size_t i = 0; i < cuts.size(); ++i) {
    if (cuts[i].is_replicate()) continue;
    terms[i] = Partial();
    of_states[i] = Shard(1);
  }
  const int64_t batch = *batch_dim(op, args);
  const bool empty = to_local(x).numel() == 0;
  Stack pieces = args;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    detail::replace_tensors(pieces[i], [&](const at::Tensor& t, std::size_t) {
      if (!t.defined() || !is_dtensor(t)) return t;
      const at::Tensor piece = to_local(t, i == 2 ? std::optional(terms) : std::nullopt);
      return empty && i < 2 ? with_one_sequence(piece, i == 0 ? batch : 1) : piece;
    });
  }
  mesh.world().guard(op.schema().name().c_str(), [&] { op.callBoxed(pieces); });
  for (std::size_t k = 0; k < pieces.size(); ++k) {
    const int64_t of_batch = k == 0 ? batch : 1;
    at::Tensor piece = pieces[k].toTensor();
    if (empty) piece = piece.narrow(of_batch, 0, 0);
    std::vector<int64_t> sizes = piece.sizes().vec();
    sizes[static_cast<std::size_t>(of_batch)] = x.size(batch);
    pieces[k] = from_local(piece.contiguous(), mesh, k == 0 ? cuts : of_states, {.shape = sizes});
  }
  give(op, stack, std::move(pieces));
}

bool without_cudnn(const at::Tensor&) { return false; }

void recurrent(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  prepare(op, *stack);
  if (argument(op, "batch_first") >= 0 && runs_on_pieces(op, take_args(op, *stack))) return run_on_pieces(op, *stack);
  run_as_written(op, *stack);
}

constexpr std::array kNames = {"gru.data",      "gru.input",      "gru_cell",       "lstm.data",
                               "lstm_cell",     "rnn_relu.data",  "rnn_relu.input", "rnn_relu_cell",
                               "rnn_tanh.data", "rnn_tanh.input", "rnn_tanh_cell"};

// ---- An LSTM in single precision or less
//
// LibTorch gives a whole layer to oneDNN, by an operator whose last result has a size that only oneDNN knows, so that
// it has no rule. Run step by step, it keeps a batch cut.

struct LstmLayer {
  at::Tensor input;                  // (steps, batch, features)
  at::Tensor hidden, cell;           // (batch, features of the state)
  at::ArrayRef<at::Tensor> weights;  // of the input, of the state; then their biases, if there are any
  bool backward = false;             // from the last step to the first
};

at::Tensor with_bias(const at::Tensor& x, const LstmLayer& layer, std::size_t which) {
  return at::linear(x, layer.weights[which], layer.weights.size() > 2 ? layer.weights[which + 2] : at::Tensor());
}

// Returns the output at every step, and leaves the last state in `layer`.
at::Tensor run_layer(LstmLayer& layer) {
  const std::vector<at::Tensor> of_input = with_bias(layer.input, layer, 0).unbind(0);
  std::vector<at::Tensor> outputs(of_input.size());
  for (std::size_t k = 0; k < outputs.size(); ++k) {
    const std::size_t step = layer.backward ? outputs.size() - 1 - k : k;
    const std::vector<at::Tensor> gates = (with_bias(layer.hidden, layer, 1) + of_input[step]).chunk(4, 1);
    layer.cell = at::sigmoid(gates[1]) * layer.cell + at::sigmoid(gates[0]) * at::tanh(gates[2]);
    layer.hidden = at::sigmoid(gates[3]) * at::tanh(layer.cell);
    outputs[step] = layer.hidden;
  }
  return at::stack(outputs, 0);
}

// Says whether the arguments are those of layers without projections that fit, on a batch that is cut. LibTorch's
// errors are of the rest.
bool goes_by_steps(const c10::OperatorHandle& op, const Stack& args) {
  if (cuts_of_batch(op, args).empty()) return false;
  const at::Tensor input = args[0].toTensor();
  const std::vector<at::Tensor> states = args[1].toTensorVector(), weights = args[2].toTensorVector();
  const auto cells = static_cast<std::size_t>(args[4].toInt() * (args[7].toBool() ? 2 : 1));
  if (input.scalar_type() == at::kDouble || input.numel() == 0 || states.size() != 2) return false;
  const int64_t batch = input.size(args[8].toBool() ? 0 : 1);
  for (const at::Tensor& state : states) {
    if (state.dim() != 3 || state.size(0) != static_cast<int64_t>(cells) || state.size(1) != batch) return false;
  }
  return states[0].size(2) == states[1].size(2) && weights.size() == cells * (args[3].toBool() ? 4 : 2);
}

// (input, states, parameters, has_biases, num_layers, dropout, train, bidirectional, batch_first)
void lstm(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  prepare(op, *stack);
  const Stack args = take_args(op, *stack);
  if (runs_on_pieces(op, args)) return run_on_pieces(op, *stack);
  if (!goes_by_steps(op, args)) return run_as_written(op, *stack);
  const std::vector<at::Tensor> states = args[1].toTensorVector(), parameters = args[2].toTensorVector();
  const std::vector<at::Tensor> hidden = states[0].unbind(0), cell = states[1].unbind(0);
  const std::size_t directions = args[7].toBool() ? 2 : 1, each = args[3].toBool() ? 4 : 2;
  const bool batch_first = args[8].toBool();
  at::Tensor x = batch_first ? args[0].toTensor().transpose(0, 1) : args[0].toTensor();
  std::vector<at::Tensor> last_hidden, last_cell;
  while (last_hidden.size() < hidden.size()) {
    if (!last_hidden.empty()) x = at::dropout(x, args[5].toDouble(), args[6].toBool());
    std::vector<at::Tensor> outputs;
    for (std::size_t d = 0; d < directions; ++d) {
      const std::size_t k = last_hidden.size();
      LstmLayer layer{.input = x,
                      .hidden = hidden[k],
                      .cell = cell[k],
                      .weights = at::ArrayRef<at::Tensor>(parameters).slice(k * each, each),
                      .backward = d == 1};
      outputs.push_back(run_layer(layer));
      last_hidden.push_back(layer.hidden);
      last_cell.push_back(layer.cell);
    }
    x = directions == 2 ? at::cat(outputs, 2) : outputs[0];
  }
  give(op, *stack, Stack{batch_first ? x.transpose(0, 1) : x, at::stack(last_hidden, 0), at::stack(last_cell, 0)});
}

void register_recurrent(torch::Library& m) {
  for (const char* name : kNames) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&recurrent>());
  m.impl("lstm.input", torch::CppFunction::makeFromBoxedFunction<&lstm>());
  m.impl("cudnn_is_acceptable", without_cudnn);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, m) { register_recurrent(m); }
TORCH_LIBRARY_IMPL(aten, PrivateUse3, m) { register_recurrent(m); }

}  // namespace
}  // namespace tessera
