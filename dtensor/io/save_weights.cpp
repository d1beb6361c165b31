#include "tessera/dtensor/io/named_tensors.h"
#include "tessera/dtensor/io/weights.h"

namespace tessera {

void save_weights(const torch::nn::Module& module, const std::string& path, const SaveOptions& options) {
  save_tensors(
      [&] {
        return SavedContents{saved_weights(module), options.metadata};
      },
      module_meshes(module), path, options.max_shard_bytes, "save_weights");
}

}  // namespace tessera
