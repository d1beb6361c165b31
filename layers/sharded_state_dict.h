#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace tessera {

// One of several like modules that a checkpoint keeps as one tensor with a dimension before the others: layer `offset`
// of `fragments`.
struct ShardOffset {
  int64_t offset = 0;
  int64_t fragments = 1;
};

// A box of a tensor that a checkpoint holds whole, and who has it.
struct ShardedTensorEntry {
  std::string key;
  at::Tensor local;                    // detached; shares storage with the module's
  std::vector<int64_t> global_shape;   // prepended dimensions first
  std::vector<int64_t> global_offset;  // of the first element of `local`
  int64_t prepended = 0;               // dimensions of global_shape that `local` lacks
  // Pipeline, tensor, data: the ranks that have the same box are numbered on each, and the one of all zeros writes it.
  std::array<int64_t, 3> replica_id = {0, 0, 0};
  // A vocabulary may be padded to another size when it is loaded.
  bool allow_shape_mismatch = false;
};

struct ShardedStateDictOptions {
  std::vector<ShardOffset> sharded_offsets;  // outermost first
  int64_t data_rank = 0;                     // this rank's place among the replicas of the model
  // This rank's place among those that have the same plain tensors. Default: its place on the mesh of the module's
  // first DTensor, and 0 where it has none.
  std::optional<int64_t> tensor_rank;
};

// What this rank has of the parameters and buffers of `module` and of its children, named as named_parameters() names
// them behind `prefix`. Where a tensor lies says it all: a layer's weight by rows, by columns, a whole bias. One entry
// a tensor, more where its piece is of several boxes (strides), none where it is empty. No communication.
// Throws std::invalid_argument on a pending reduction and on an offset outside its fragments.
std::vector<ShardedTensorEntry> sharded_state_dict(const torch::nn::Module& module, const std::string& prefix = "",
                                                   const ShardedStateDictOptions& options = {});

}  // namespace tessera
