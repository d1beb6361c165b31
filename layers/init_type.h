#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

namespace tessera {

// Gives a weight its first values, in place and without a gradient: any function of torch::nn::init that takes one
// tensor, or your own. It receives the whole weight as a DTensor, so that what depends on its sizes, such as the fan,
// is right, and the values are the same on any number of ranks.
using InitMethod = std::function<void(at::Tensor weight)>;

enum class InitType {
  kOrthogonal,      // torch::nn::init::orthogonal_ with gain 0.01
  kNormal,          // standard deviation 0.01
  kBiasedNormal,    // the same as kNormal
  kUniform,         // [0, 0.02)
  kKaimingUniform,  // this and the next three: torch::nn::init's defaults
  kKaimingNormal,
  kXavierUniform,
  kXavierNormal,
  kTruncNormal,  // standard deviation 0.01, truncated to [-2, 2]
  kDirac,        // for 3 to 5 dimensions, so for no linear layer
  kConstant,     // 0.02
  kZeros,
  kOnes,
};

// Converts to and from names such as "xavier_normal". init_type throws std::invalid_argument on an unknown name, and
// lists the names.
std::string_view to_string(InitType type);
InitType init_type(std::string_view name);

// Fills a weight as the type says. Plain tensors are filled by LibTorch's generator. init_method returns that as a
// function. Throws as LibTorch's functions do: on fewer than two dimensions for the orthogonal, Kaiming and Xavier
// types, and on other than 3 to 5 for kDirac.
void initialize_(const at::Tensor& weight, InitType type);
InitMethod init_method(InitType type);

// Returns the placement of a layer's weight along its sharded dimension: each rank has `stride` blocks, assigned to
// ranks in turn, so that every rank has a share of each of `stride` fused projections. With stride 1 it is a Shard,
// which splits as torch.chunk does.
// Throws std::invalid_argument when `size` is not a multiple of ranks * stride, unless stride is 1 and `allow_uneven`
// is set.
Placement affine_placement(int64_t tensor_dim, int64_t size, int64_t ranks, int64_t stride = 1,
                           bool allow_uneven = false);

// Fills the plain `weight` with this rank's piece of a weight [out_features, in_features] that is sharded over the 1-D
// `mesh` along `partition_dim`: per_partition_size on each rank, in `stride` blocks. The whole has the same values on
// any number of ranks, as dtensor/random.h says.
// Does not communicate.
// Throws std::invalid_argument, on every rank, on sizes that do not fit, and where affine_placement does.
void initialize_affine_weight_(const at::Tensor& weight, int64_t out_features, int64_t in_features,
                               int64_t per_partition_size, int64_t partition_dim, const DeviceMesh& mesh,
                               const InitMethod& method, int64_t stride = 1);

}  // namespace tessera
