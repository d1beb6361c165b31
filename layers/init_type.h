#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

namespace tessera {

// Gives a weight its first values, in place, without a gradient: any of torch::nn::init that takes one tensor, or one's
// own. It is given the whole weight, a DTensor: what depends on its sizes, such as a fan, is right, and the values are
// the same on any number of ranks.
using InitMethod = std::function<void(at::Tensor weight)>;

enum class InitType {
  kOrthogonal,      // times 0.01
  kNormal,          // of deviation 0.01
  kBiasedNormal,    // the same; the mean is 0
  kUniform,         // [0, 0.02)
  kKaimingUniform,  // these four as torch::nn::init has them by default
  kKaimingNormal,
  kXavierUniform,
  kXavierNormal,
  kTruncNormal,  // of deviation 0.01, cut off at -2 and 2
  kDirac,        // of 3 to 5 dimensions, so of no linear layer
  kConstant,     // 0.02
  kZeros,
  kOnes,
};

// "xavier_normal" and so on. init_type throws std::invalid_argument on another name, listing them.
std::string_view to_string(InitType type);
InitType init_type(std::string_view name);

// What the type does to a weight; plain tensors are drawn by LibTorch's generator.
void initialize_(const at::Tensor& weight, InitType type);
InitMethod init_method(InitType type);

// How the pieces of a layer's weight lie along the dimension that is cut: `stride` pieces a rank, dealt out in turn, so
// that a fused projection of `stride` parts has a share of each on every rank. 1: one piece, by torch.chunk's rule.
// Throws std::invalid_argument when the ranks times stride do not divide `size`, unless stride is 1 and `allow_uneven`.
Placement affine_placement(int64_t tensor_dim, int64_t size, int64_t ranks, int64_t stride = 1,
                           bool allow_uneven = false);

// Fills `weight`, a plain tensor, with this rank's piece of a weight [out_features, in_features] that is cut over the
// one dimension of `mesh` along `partition_dim`, per_partition_size on each rank, in `stride` pieces. The same whole on
// any number of ranks, drawn as dtensor/random.h says. No communication.
// Throws std::invalid_argument, on every rank alike, on sizes that do not fit, and as affine_placement.
void initialize_affine_weight_(const at::Tensor& weight, int64_t out_features, int64_t in_features,
                               int64_t per_partition_size, int64_t partition_dim, const DeviceMesh& mesh,
                               const InitMethod& method, int64_t stride = 1);

}  // namespace tessera
