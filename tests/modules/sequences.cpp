#include <torch/nn/utils/rnn.h>

#include "tessera/tests/modules/row.h"

// clang-format off
namespace tessera::testing {

using namespace torch::nn;  // NOLINT: rows are written as a user writes modules

namespace {

// Runs the module on six packed sequences of different lengths, the longest first, and returns the padded output.
template <class Module>
Tensors packed(Module& m, const at::Tensor& x) {
  const auto sequence = utils::rnn::pack_padded_sequence(x, at::tensor({5, 5, 4, 2, 2, 1}, at::kLong));
  const auto [out, state] = m->forward_with_packed_input(sequence);
  return {std::get<0>(utils::rnn::pad_packed_sequence(out))};
}

}  // namespace

// Inputs are (length 5, batch 6, 4 features), states (layers and directions, batch 6, 3).
std::vector<ModuleRow> recurrent_rows() {
  return {
      MODULE(RNN(4, 3), waves({5, 6, 4})),
      MODULE(RNN(4, 3), waves({5, 6, 4}), plain(waves({1, 6, 3}, 2))),
      MODULE(RNN(4, 3), waves({5, 6, 4}), waves({1, 6, 3}, 2)),
      MODULE(RNN(RNNOptions(4, 3).nonlinearity(torch::kReLU).bias(false)), waves({5, 6, 4})),
      MODULE(RNN(RNNOptions(4, 3).num_layers(2).bidirectional(true).batch_first(true)), waves({6, 5, 4})),
      MODULE(LSTM(4, 3), waves({5, 6, 4})),
      MODULE_BY(LSTM(4, 3), m->forward(t[0], std::make_tuple(t[1], t[2])), waves({5, 6, 4}), plain(waves({1, 6, 3}, 2)), plain(waves({1, 6, 3}, 3))),
      MODULE_BY(LSTM(4, 3), m->forward(t[0], std::make_tuple(t[1], t[2])), waves({5, 6, 4}), waves({1, 6, 3}, 2), waves({1, 6, 3}, 3)),
      MODULE(LSTM(LSTMOptions(4, 3).num_layers(2).bidirectional(true)), waves({5, 6, 4})),
      MODULE(LSTM(LSTMOptions(4, 3).proj_size(2)), waves({5, 6, 4})),
      MODULE(LSTM(LSTMOptions(4, 3).bias(false).batch_first(true)), waves({6, 5, 4})),
      MODULE(GRU(4, 3), waves({5, 6, 4})),
      MODULE(GRU(4, 3), waves({5, 6, 4}), plain(waves({1, 6, 3}, 2))),
      MODULE(GRU(4, 3), waves({5, 6, 4}), waves({1, 6, 3}, 2)),
      MODULE(GRU(GRUOptions(4, 3).num_layers(2).bidirectional(true).batch_first(true)), waves({6, 5, 4})),
      MODULE_BY(RNN(4, 3), packed(m, t[0]), waves({5, 6, 4})),
      MODULE_BY(LSTM(4, 3), packed(m, t[0]), waves({5, 6, 4})),
      MODULE_BY(GRU(GRUOptions(4, 3).bidirectional(true)), packed(m, t[0]), waves({5, 6, 4})),
      drawing(MODULE(RNN(RNNOptions(4, 3).num_layers(2).dropout(0.4)), waves({5, 6, 4}))),
      drawing(MODULE(LSTM(LSTMOptions(4, 3).num_layers(2).dropout(0.4)), waves({5, 6, 4}))),
      drawing(MODULE(GRU(GRUOptions(4, 3).num_layers(2).dropout(0.4)), waves({5, 6, 4}))),
      in_eval(MODULE(LSTM(LSTMOptions(4, 3).num_layers(2).dropout(0.4)), waves({5, 6, 4}))),
      MODULE(RNNCell(4, 3), waves({6, 4})),
      MODULE(RNNCell(4, 3), waves({6, 4}), plain(waves({6, 3}, 2))),
      MODULE(RNNCell(RNNCellOptions(4, 3).nonlinearity(torch::kReLU)), waves({6, 4}), waves({6, 3}, 2)),
      MODULE(LSTMCell(4, 3), waves({6, 4})),
      MODULE_BY(LSTMCell(4, 3), m->forward(t[0], std::make_tuple(t[1], t[2])), waves({6, 4}), plain(waves({6, 3}, 2)), plain(waves({6, 3}, 3))),
      MODULE_BY(LSTMCell(4, 3), m->forward(t[0], std::make_tuple(t[1], t[2])), waves({6, 4}), waves({6, 3}, 2), waves({6, 3}, 3)),
      MODULE(GRUCell(4, 3), waves({6, 4})),
      MODULE(GRUCell(4, 3), waves({6, 4}), plain(waves({6, 3}, 2))),
      MODULE(GRUCell(4, 3), waves({6, 4}), waves({6, 3}, 2)),
  };
}

// Inputs are (length, batch, 8 features), with 4 heads.
std::vector<ModuleRow> attention_rows() {
  return {
      MODULE_BY(MultiheadAttention(8, 4), m->forward(t[0], t[0], t[0]), waves({5, 6, 8})),
      MODULE_BY(MultiheadAttention(8, 4), m->forward(t[0], t[1], t[1]), waves({5, 6, 8}), waves({3, 6, 8}, 2)),
      MODULE(MultiheadAttention(8, 4), waves({5, 6, 8}), waves({3, 6, 8}, 2), waves({3, 6, 8}, 3)),
      MODULE(MultiheadAttention(MultiheadAttentionOptions(8, 4).kdim(5).vdim(5)), waves({5, 6, 8}), waves({3, 6, 5}, 2), waves({3, 6, 5}, 3)),
      MODULE(MultiheadAttention(MultiheadAttentionOptions(8, 4).add_bias_kv(true).add_zero_attn(true)), waves({5, 6, 8}), waves({3, 6, 8}, 2), waves({3, 6, 8}, 3)),
      MODULE_BY(MultiheadAttention(8, 4), m->forward(t[0], t[0], t[0], t[1], true, t[2]), waves({5, 6, 8}), plain(at::arange(30).view({6, 5}).remainder(7) == 1), plain(waves({5, 5}))),
      drawing(MODULE_BY(MultiheadAttention(MultiheadAttentionOptions(8, 4).dropout(0.3)), m->forward(t[0], t[0], t[0]), waves({5, 6, 8}))),
      MODULE(TransformerEncoderLayer(TransformerEncoderLayerOptions(8, 4).dim_feedforward(12).dropout(0)), waves({5, 6, 8})),
      MODULE(TransformerEncoderLayer(TransformerEncoderLayerOptions(8, 4).dim_feedforward(12).dropout(0).activation(torch::kGELU)), waves({5, 6, 8}), plain(waves({5, 5}))),
      MODULE(TransformerDecoderLayer(TransformerDecoderLayerOptions(8, 4).dim_feedforward(12).dropout(0)), waves({5, 6, 8}), waves({3, 6, 8}, 2)),
      MODULE(TransformerEncoder(TransformerEncoderOptions(TransformerEncoderLayerOptions(8, 4).dim_feedforward(12).dropout(0), 2)), waves({5, 6, 8})),
      MODULE(TransformerDecoder(TransformerDecoderOptions(TransformerDecoderLayerOptions(8, 4).dim_feedforward(12).dropout(0), 2)), waves({5, 6, 8}), waves({3, 6, 8}, 2)),
      MODULE(Transformer(TransformerOptions(8, 4, 1, 1).dim_feedforward(12).dropout(0)), waves({5, 6, 8}), waves({3, 6, 8}, 2)),
      drawing(MODULE(Transformer(TransformerOptions(8, 4, 1, 1).dim_feedforward(12).dropout(0.2)), waves({5, 6, 8}), waves({3, 6, 8}, 2))),
      in_eval(MODULE(TransformerEncoderLayer(TransformerEncoderLayerOptions(8, 4).dim_feedforward(12).dropout(0.2)), waves({5, 6, 8}))),
  };
}

}  // namespace tessera::testing
