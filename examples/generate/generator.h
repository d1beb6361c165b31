#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/examples/generate/generate_options.h"
#include "tessera/examples/language_model/transformer.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/styles/parallelize.h"

using ParallelTransformer = tessera::Parallelized<Transformer>;

// Makes the model in its shards, reads on each rank that rank's part of the weights, verifies their checksums, and
// converts them to `dtype`. `checkpoint` is the folder of one training state, whose weights are of the dtype `saved`.
// No rank holds a whole weight that the plan cuts, at any moment. Sets the random state of the mesh's World to the
// saved one. For communication and errors see load_training_state.
ParallelTransformer load_model(const TransformerOptions& options, const std::string& checkpoint, at::ScalarType saved,
                               at::ScalarType dtype, const tessera::DeviceMesh& mesh);

// Writes text after a prompt, one token at a time.
class Generator {
 public:
  // Takes a model in evaluation mode: a ParallelTransformer on `mesh`, or a plain Transformer, which every rank has.
  using Forward = std::function<at::Tensor(const at::Tensor& ids, KeyValueCache* cache)>;
  Generator(Forward forward, int64_t sequence, const tessera::DeviceMesh& mesh)
      : forward_(std::move(forward)), sequence_(sequence), mesh_(mesh) {}

  // Calls `on_token` on every rank with each token, as soon as it is chosen. Every rank gives the same `text`, at least
  // one token.
  //
  // The model takes `sequence` positions. Of a longer text it sees the last `sequence` tokens. When the cache is full,
  // it is filled anew with the last half of `sequence`, since the numbers of the positions are part of what is cached.
  // So the time per token stays the same, and what comes next depends on the last half at least.
  //
  // Communication for each token: that of the model's forward, and one all_gather of the last position's logits.
  void generate(std::vector<int64_t> text, const GenerateOptions& options,
                const std::function<void(int64_t token)>& on_token);

  // Returns the bytes of the keys and values that this rank holds.
  int64_t cache_bytes_here() const;

 private:
  at::Tensor logits_after(const std::vector<int64_t>& tokens);

  Forward forward_;
  int64_t sequence_;
  tessera::DeviceMesh mesh_;
  KeyValueCache cache_;
};
