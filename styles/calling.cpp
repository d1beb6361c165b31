#include "tessera/styles/calling.h"

#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/dtensor.h"

namespace tessera::detail {

void BatchCheck::see(const at::Tensor& t) {
  if (!t.defined()) return;
  if (is_dtensor(t)) {
    passes_ = true;
  } else if (t.dim() > 0 && !plain_) {
    plain_ = t.sizes().vec();
  }
}

void BatchCheck::check(const std::string& split_mesh) const {
  if (passes_ || !plain_) return;
  throw std::invalid_argument(fmt::format(
      "the parallelized module: its input [{}] is plain, and on the mesh {} with data dimensions nobody can "
      "know which part of the batch it is. Give from_local(piece, mesh, {{Shard(0) on the data "
      "dimensions}}), or distribute_tensor where each rank has the whole. If no mesh dimension splits the batch, set "
      "options.tensor_dim of parallelize_module on a mesh of one dimension, and else options.data_dims to an empty "
      "vector; if forward makes DTensors itself, or the input is no part of a "
      "batch, set options.allow_plain. Under InferenceMode it may be each rank's own",
      fmt::join(*plain_, ", "), split_mesh));
}

void refuse_without_hooks() {
  throw std::invalid_argument(
      "the parallelized module: its root is a TESSERA_MODULE with hooks, of a style or of your own, and "
      "parallelize_module got a pointer or reference to the class beneath (BlockImpl), whose forward runs none. Pass "
      "the holder (Block), or a pointer or reference to Block::Impl");
}

}  // namespace tessera::detail
