#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace tessera {

// Says that a module is one of several equal ones, which a checkpoint keeps as one tensor with an additional first
// dimension: layer `offset` of `fragments`.
struct ShardOffset {
  int64_t offset = 0;
  int64_t fragments = 1;
};

// This rank's box of a tensor that a checkpoint holds whole, and the ranks that have the same box.
struct ShardedTensorEntry {
  std::string key;
  at::Tensor local;                    // detached; shares storage with the module's
  std::vector<int64_t> global_shape;   // the prepended dimensions first
  std::vector<int64_t> global_offset;  // of the first element of `local`
  int64_t prepended = 0;               // the number of leading dimensions of global_shape that `local` does not have
  // The rank's number among those that have the same box, for pipeline, tensor and data parallelism; the rank of all
  // zeros writes the box.
  std::array<int64_t, 3> replica_id = {0, 0, 0};
  // The checkpoint may have another size, since a vocabulary may be padded differently when it is loaded.
  bool allow_shape_mismatch = false;
};

struct ShardedStateDictOptions {
  std::vector<ShardOffset> sharded_offsets = {};  // outermost first
  int64_t data_rank = 0;                          // this rank's number among the replicas of the model
  // This rank's number among the ranks that have the same plain tensors. Default: its position on the mesh of the
  // module's first DTensor, or 0 if it has none.
  std::optional<int64_t> tensor_rank = {};
};

// Lists this rank's pieces of the parameters and buffers of `module` and its children, under the names of
// named_parameters() after `prefix`. Where a parameter of a layer was assigned, that is the tensor in use. Each layout
// is read from the tensor itself: a weight by rows, by columns, a whole bias. A tensor has one entry, several where its
// piece consists of several boxes (strides), and none where the piece is empty.
// Does not communicate.
// Throws std::invalid_argument on a pending reduction and on an offset outside its fragments.
std::vector<ShardedTensorEntry> sharded_state_dict(const torch::nn::Module& module, const std::string& prefix = "",
                                                   const ShardedStateDictOptions& options = {});

}  // namespace tessera
