#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

// How a table [num_embeddings, embedding_dim] is cut over the ranks.
enum class EmbeddingCut {
  kVocabulary,  // each rank has rows: of the ids that are its own
  kWidth,       // each rank has columns, of every id
  kNone,        // each rank has the whole table: nothing is sent
};

struct ShardedEmbeddingOptions {
  EmbeddingCut cut = EmbeddingCut::kVocabulary;
  // Of the whole table. Default: as many rows (kVocabulary) or columns (kWidth) on every rank as here. Uneven ones,
  // which lie as torch.chunk has it, need it: without it nothing tells that they are uneven, but where a rank has none.
  std::optional<int64_t> num_embeddings;
  std::optional<int64_t> embedding_dim;
  // The id whose row gets no gradient, of the whole table; negative counts from its end.
  std::optional<int64_t> padding_idx;
  // Rows that are looked up and whose norm, of the whole row, is greater are scaled down to it, in place, before they
  // are.
  std::optional<double> max_norm;
  double norm_type = 2;  // any p of at::norm
  bool scale_grad_by_freq = false;
  bool sparse = false;  // the gradient of `weight` is a sparse tensor
};

// weight[ids], where `weight` is this rank's plain part of the table and `ids` [*] are plain and alike on every rank:
// [*, embedding_dim], alike on every rank. `weight` is written where max_norm is given.
//
// Collectives over the one dimension of `mesh`, on more than one rank. kVocabulary: one all_reduce of the result.
// kWidth: one all_gather of this rank's columns of it, and with max_norm one all_reduce of a number for each different
// id. Backward: none. On a GPU the host waits for the check of the ids, and by the vocabulary for the number of those
// that are this rank's. Throws std::invalid_argument, on every rank alike, on an id or padding_idx outside the table,
// ids that are no integers, undefined tensors, DTensors, tensors on another device than the mesh's, and a mesh of
// several dimensions or without this rank. A weight that is no piece of the table, which this rank alone may have,
// fails the job; so does an id or padding_idx outside where each rank counts by its own rows.
at::Tensor sharded_embedding(const at::Tensor& ids, const at::Tensor& weight, const DeviceMesh& mesh,
                             const ShardedEmbeddingOptions& options = {});

// The same with the result left as each rank computed it, without the collective of the result: kVocabulary this rank's
// term, kWidth its columns, kNone the whole.
at::Tensor sharded_embedding_local(const at::Tensor& ids, const at::Tensor& weight, const DeviceMesh& mesh,
                                   const ShardedEmbeddingOptions& options = {});

}  // namespace tessera
