#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/pimpl.h>

#include "tessera/layers/init_type.h"
#include "tessera/layers/layer.h"
#include "tessera/layers/parallel_linear.h"
#include "tessera/layers/sharded_embedding.h"
#include "tessera/mesh/device_mesh.h"

// Embeddings whose table is cut over the ranks of a mesh of one dimension, by the vocabulary, by the width, or not. The
// table is a DTensor, of values that do not depend on the number of ranks. Of plain ids, alike on every rank, the
// output is plain and whole on every rank; of a DTensor of ids it is a DTensor.
namespace tessera {

struct ParallelEmbeddingOptions {
  ParallelEmbeddingOptions(int64_t num_embeddings, int64_t embedding_dim)
      : num_embeddings(num_embeddings), embedding_dim(embedding_dim) {}

  int64_t num_embeddings;
  int64_t embedding_dim;
  EmbeddingCut cut = EmbeddingCut::kWidth;
  // As in torch::nn::EmbeddingOptions; ids are of the whole table, negative ones count from its end.
  std::optional<int64_t> padding_idx;
  std::optional<double> max_norm;
  double norm_type = 2;
  bool scale_grad_by_freq = false;
  bool sparse = false;  // the gradient of a DTensor is dense, so this changes nothing
  // First values; the row of padding_idx is 0 afterwards. None: the kXavierNormal of ml's and FairScale's, and the
  // normal values of TorchShard's (parallel_embedding_layer).
  InitMethod init_method;
  // In their place: the whole table, plain and alike on every rank. The layer keeps its piece alone.
  at::Tensor given_weight;
  bool allow_uneven = false;  // rows or columns that the ranks do not divide, by torch.chunk's rule; a sequence is even
  ModelParallelConfig config = {};  // sequence_parallel: the output is cut along dimension 0
};

// Collectives, on more than one rank: those of sharded_embedding; under sequence_parallel by the vocabulary one
// reduce_scatter in the place of the all_reduce, and one all_gather in backward.
// The constructor throws std::invalid_argument, on every rank alike, on rows or columns that the ranks do not divide
// (unless allow_uneven), a padding_idx outside the table, a given_weight of other sizes, sequence_parallel of a table
// that is not cut by the vocabulary, and a mesh of several dimensions or without this rank.
// The weight may be assigned, and the layer cloned, printed and put into containers, as parallel_linear.h says.
class ParallelEmbeddingImpl : public Layer<ParallelEmbeddingImpl> {
 public:
  ParallelEmbeddingImpl(const ParallelEmbeddingOptions& options, const DeviceMesh& mesh);
  // ids [*] -> [*, embedding_dim]. Throws as sharded_embedding, on an id without a dimension under sequence_parallel,
  // and with max_norm, which writes the table, on an assigned one that lies otherwise.
  at::Tensor forward(const at::Tensor& ids);

  // The whole table, plain and detached. One all_gather on more than one rank.
  at::Tensor master_weight() const;

  void pretty_print(std::ostream& stream) const override;
  std::vector<LayerParameter<ParallelEmbeddingImpl>> layer_parameters() const {
    return {{"weight", &ParallelEmbeddingImpl::weight}};
  }

  ParallelEmbeddingOptions options;
  at::Tensor weight;  // [num_embeddings, embedding_dim]

 private:
  at::Tensor piece() const;
  at::Tensor of_plain(const at::Tensor& ids) const;

  DeviceMesh mesh_;
};
TORCH_MODULE(ParallelEmbedding);

// Megatron-Core's: cut by the vocabulary, no padding.
ParallelEmbedding vocab_parallel_embedding(int64_t num_embeddings, int64_t embedding_dim, const DeviceMesh& mesh,
                                           const InitMethod& method, const ModelParallelConfig& config = {});

}  // namespace tessera
