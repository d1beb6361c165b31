#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

// Says how a table [num_embeddings, embedding_dim] is sharded over the ranks.
enum class EmbeddingCut {
  kVocabulary,  // each rank has some rows, and looks up their ids
  kWidth,       // each rank has some columns, and looks up every id
  kNone,        // each rank has the whole table: no communication
};

struct ShardedEmbeddingOptions {
  EmbeddingCut cut = EmbeddingCut::kVocabulary;
  // Sizes of the whole table. Default: every rank has as many rows (kVocabulary) or columns (kWidth) as this one. Give
  // them where parts are uneven, as torch.chunk splits them: without them only a rank without any rows or columns
  // notices that.
  std::optional<int64_t> num_embeddings = {};
  std::optional<int64_t> embedding_dim = {};
  // The id, in the whole table, whose row gets no gradient; a negative one counts from the table's end.
  std::optional<int64_t> padding_idx = {};
  // Rows that are looked up are first scaled down, in place, to this norm where the norm of the whole row is greater.
  std::optional<double> max_norm = {};
  double norm_type = 2;  // any p of at::norm
  bool scale_grad_by_freq = false;
  bool sparse = false;  // the gradient of `weight` is a sparse tensor
};

// Returns weight[ids], [*, embedding_dim], the same on every rank. `weight` is this rank's plain part of the table, and
// `ids` [*] are plain and the same on every rank. With max_norm `weight` is written.
//
// Collectives over the 1-D `mesh`, on more than one rank. kVocabulary: one all_reduce of the result. kWidth: one
// all_gather of this rank's columns of the result, and with max_norm one all_reduce of one number per different id.
// Backward: none. With kVocabulary and max_norm or sparse, or in forward mode, the host waits for a GPU's number of ids
// that this rank looks up. An id outside the table ends the process's use of the GPU (mesh/core/device_checks.h).
// Throws std::invalid_argument, on every rank, on a padding_idx or, on the CPU, an id outside the table, ids that are
// no integers, undefined tensors, DTensors, tensors on another device than the mesh's, and a mesh of several dimensions
// or without this rank. A weight that is no piece of the table, which only this rank may have, fails the job; so does
// an id or padding_idx outside the table where num_embeddings is not given and each rank takes the size from its own
// rows, and an id outside the table where the world has more ranks than the mesh.
at::Tensor sharded_embedding(const at::Tensor& ids, const at::Tensor& weight, const DeviceMesh& mesh,
                             const ShardedEmbeddingOptions& options = {});

// Does the same without the collective of the result, and returns what this rank computed: its term of the sum
// (kVocabulary), its columns (kWidth), or the whole (kNone).
at::Tensor sharded_embedding_local(const at::Tensor& ids, const at::Tensor& weight, const DeviceMesh& mesh,
                                   const ShardedEmbeddingOptions& options = {});

}  // namespace tessera
