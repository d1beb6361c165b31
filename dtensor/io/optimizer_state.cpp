#include "tessera/dtensor/io/optimizer_state.h"

#include <optional>
#include <vector>

#include <torch/optim/optimizer.h>

#include "tessera/dtensor/agreement.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/checkpoint.h"
#include "tessera/dtensor/io/checkpoint_index.h"
#include "tessera/dtensor/io/named_tensors.h"
#include "tessera/dtensor/io/optimizer_contents.h"
#include "tessera/dtensor/optimizer_parameters.h"
#include "tessera/mesh/core/deferred_tensor.h"

namespace tessera {

void save_optimizer(const torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
                    const std::string& path) {
  const detail::NotDeferred own_tensors;
  save_tensors([&] { return optimizer_contents(optimizer, module, "save_optimizer"); },
               meshes_of(parameters_of(optimizer)), path, 0, "save_optimizer", kOptimizerName);
}

void load_optimizer(torch::optim::Optimizer& optimizer, const torch::nn::Module& module, const std::string& path) {
  const detail::NotDeferred own_tensors;
  const Agreement agreement(meshes_of(parameters_of(optimizer)), "load_optimizer");
  std::optional<Checkpoint> checkpoint;
  std::optional<OptimizerLoad> load;
  agreement.run(
      [&] {
        load.emplace(optimizer, module, "load_optimizer");
        // Earlier versions took the second name in a folder.
        checkpoint.emplace(path, nullptr, std::vector<const char*>{kOptimizerName, kWeightsName});
        load->plan(*checkpoint, path);
      },
      [&] { return agreement.meshes().empty() ? "" : checkpoint->fingerprint(); }, kDifferentCheckpoints);
  agreement.run([&] { load->read(); });
  load->apply();
}

}  // namespace tessera
