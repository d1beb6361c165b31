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

// Embeddings whose table is sharded over the ranks of a 1-D mesh by the vocabulary or by the width, or replicated. The
// table is a DTensor, and its first values do not depend on the number of ranks. For plain ids, the same on every rank,
// the output is plain and whole on every rank; for a DTensor of ids it is a DTensor.
namespace tessera {

struct ParallelEmbeddingOptions {
  ParallelEmbeddingOptions(int64_t num_embeddings, int64_t embedding_dim)
      : num_embeddings(num_embeddings), embedding_dim(embedding_dim) {}

  int64_t num_embeddings;
  int64_t embedding_dim;
  EmbeddingCut cut = EmbeddingCut::kWidth;
  // These are as in torch::nn::EmbeddingOptions. Ids are those of the whole table; a negative padding_idx counts from
  // its end.
  std::optional<int64_t> padding_idx;
  std::optional<double> max_norm;
  double norm_type = 2;
  bool scale_grad_by_freq = false;
  bool sparse = false;  // has no effect: a DTensor's gradient is dense
  // Gives the first values; the row of padding_idx is set to 0 afterwards. Default: kXavierNormal, as in ml and
  // FairScale; parallel_embedding_layer has TorchShard's normal distribution.
  InitMethod init_method;
  // Is given instead of first values: the whole table, plain and the same on every rank. The layer keeps only its
  // piece, in the table's dtype, whatever config.params_dtype says.
  at::Tensor given_weight;
  // Allows sizes that are not a multiple of the number of ranks, split as torch.chunk does; a sequence stays even.
  bool allow_uneven = false;
  ModelParallelConfig config = {};  // sequence_parallel: the output is sharded along dimension 0
};

// Collectives, on more than one rank: those of sharded_embedding. With sequence_parallel, which needs a table sharded
// by the vocabulary: one reduce_scatter in the place of the all_reduce, and one all_gather in backward.
// Throws std::invalid_argument in the constructor, on every rank, on rows or columns that are not a multiple of the
// number of ranks (unless allow_uneven), a padding_idx outside the table, a given_weight of other sizes,
// sequence_parallel of a table that is not sharded by the vocabulary, and a mesh of several dimensions or without this
// rank. The weight may be assigned, and the layer cloned, printed and put into containers, as parallel_linear.h says.
class ParallelEmbeddingImpl : public Layer<ParallelEmbeddingImpl> {
 public:
  ParallelEmbeddingImpl(const ParallelEmbeddingOptions& options, const DeviceMesh& mesh);
  // ids [*] -> [*, embedding_dim]. Throws where sharded_embedding does; on an id without a dimension under
  // sequence_parallel; and, with max_norm, which writes the table, on an assigned table with another layout.
  at::Tensor forward(const at::Tensor& ids);

  // Returns the whole table, plain and detached. Runs one all_gather on more than one rank, and none with
  // EmbeddingCut::kNone.
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

// Makes Megatron-Core's embedding: sharded by the vocabulary, without padding.
ParallelEmbedding vocab_parallel_embedding(int64_t num_embeddings, int64_t embedding_dim, const DeviceMesh& mesh,
                                           const InitMethod& method, const ModelParallelConfig& config = {});

}  // namespace tessera
