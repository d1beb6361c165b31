#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

// These declarations are the training that `tools/bench train` measures: the model of
// examples/language_model/transformer.h without dropout, its first values, and its data. train_peer.py has the same.
namespace tessera::bench {

// Is what a step gives.
struct TrainStep {
  double loss = 0;  // the mean over all rows
  double norm = 0;  // of all gradients, before they are clipped
};

struct TrainCase {
  int64_t dp = 4;
  int64_t tp = 1;
  int64_t zero = 0;  // 3: parameters are cut over dp too
  int64_t hidden = 256;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t sequence = 128;
  int64_t batch = 8;  // sequences in the batch of all ranks

  static constexpr int64_t kVocabulary = 256;

  int64_t ranks() const { return dp * tp; }
  // Returns text such as "dp=2,tp=2", or "dp=4 zero".
  std::string mesh_name() const;
  // Returns text such as "dp=2,tp=2, hidden 256".
  std::string name() const;
  // text() returns the fields in their order. parse() reads such text; it throws std::invalid_argument on other text.
  std::string text() const;
  static TrainCase parse(const std::string& text);
};

// Describes a parameter of the model.
struct TrainParameter {
  std::vector<int64_t> sizes;
  int64_t cut_dim;  // the dimension that tensor parallelism cuts; -1 for none
  bool is_bias;     // a bias, or a norm's shift
};
// Returns those outside the blocks: of the tokens' and the positions' embedding, of the last norm, and of the head.
std::vector<TrainParameter> root_parameters(const TrainCase& size);
std::vector<TrainParameter> block_parameters(const TrainCase& size);
// Returns all, in the order of the model's named_parameters(): the embeddings, the blocks, the norm, the head.
std::vector<TrainParameter> all_parameters(const TrainCase& size);

// Returns the first values of the `index`th parameter of all.
at::Tensor first_values(const TrainCase& size, const TrainParameter& parameter, int64_t index);

// Returns the ids and the targets, [batch / dp, sequence] each, of the rank that is `rank` along dp.
std::pair<at::Tensor, at::Tensor> rows_of(const TrainCase& size, int64_t rank);

}  // namespace tessera::bench
