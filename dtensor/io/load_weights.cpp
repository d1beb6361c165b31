#include <optional>
#include <vector>

#include "tessera/dtensor/agreement.h"
#include "tessera/dtensor/io/checkpoint.h"
#include "tessera/dtensor/io/named_tensors.h"
#include "tessera/dtensor/io/weight_slots.h"
#include "tessera/dtensor/io/weights.h"
#include "tessera/mesh/core/deferred_tensor.h"

namespace tessera {

void load_weights(torch::nn::Module& module, const std::string& path, const LoadOptions& options) {
  const detail::NotDeferred own_tensors;
  const Agreement agreement(module_meshes(module), "load_weights");
  std::optional<Checkpoint> checkpoint;
  std::vector<WeightSlot> slots;
  agreement.run(
      [&] {
        const std::vector<ModuleTensor> tensors = module_tensors(module);
        checkpoint.emplace(path);
        slots = match_weights(tensors, *checkpoint, path, &options, "load_weights");
      },
      [&] { return to_string(options.rules) + (agreement.meshes().empty() ? "" : checkpoint->fingerprint()); },
      "the ranks opened different checkpoints or gave different rules: their paths lead to different files, a save "
      "replaced them meanwhile, or `rules` differ; pass the same on every rank, and load again");
  agreement.run([&] { read_weights(slots, *checkpoint, options); });
  if (!options.in_place) write_weights(slots);
}

}  // namespace tessera
