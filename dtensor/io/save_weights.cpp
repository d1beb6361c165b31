#include <vector>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/named_tensors.h"
#include "tessera/dtensor/io/weights.h"

namespace tessera {

void save_weights(const torch::nn::Module& module, const std::string& path, const SaveOptions& options) {
  const std::vector<SavedTensor> tensors = saved_weights(module);
  std::vector<at::Tensor> values;
  for (const SavedTensor& item : tensors) values.push_back(item.tensor);
  save_tensors(tensors, meshes_of(values), path, options.max_shard_bytes, options.metadata, "save_weights");
}

}  // namespace tessera
