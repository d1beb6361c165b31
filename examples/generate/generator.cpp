#include "tessera/examples/generate/generator.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <utility>

#include <torch/torch.h>

#include "tessera/dtensor/deferred/sharded_init.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/training_state.h"
#include "tessera/examples/generate/sampling.h"
#include "tessera/examples/language_model/parallel_plan.h"

namespace {

std::vector<int64_t> last(const std::vector<int64_t>& text, int64_t count) {
  return {text.end() - std::min<std::ptrdiff_t>(count, std::ssize(text)), text.end()};
}

}  // namespace

ParallelTransformer load_model(const TransformerOptions& options, const std::string& checkpoint, at::ScalarType saved,
                               at::ScalarType dtype, const tessera::DeviceMesh& mesh) {
  const torch::NoGradGuard no_gradient;
  std::optional<tessera::ShardedInit> init(std::in_place, mesh);
  Transformer model(options);
  init.reset();
  ParallelTransformer parallel = tessera::parallelize_module(model, mesh, parallel_plan(options));
  parallel->eval();
  model->to(saved);
  tessera::TrainingState state = {.mesh = mesh, .model = *model};
  tessera::load_training_state(state, checkpoint);
  model->to(dtype);
  return parallel;
}

void Generator::generate(std::vector<int64_t> text, const GenerateOptions& options,
                         const std::function<void(int64_t token)>& on_token) {
  if (text.empty()) throw std::invalid_argument("generate: the prompt is empty; give at least one token");
  const torch::NoGradGuard no_gradient;
  cache_.length = 0;
  std::vector<int64_t> fresh = last(text, sequence_);
  for (int64_t i = 0; i < options.tokens; ++i) {
    if (cache_.length + std::ssize(fresh) > sequence_) {
      cache_.length = 0;
      fresh = last(text, std::max<int64_t>(sequence_ / 2, 1));
    }
    const int64_t token = choose_token(logits_after(fresh).cpu(), options.sampling, mesh_);
    if (token == options.stop) return;
    on_token(token);
    text.push_back(token);
    fresh = {token};
  }
}

at::Tensor Generator::logits_after(const std::vector<int64_t>& tokens) {
  const at::Tensor ids = torch::tensor(tokens, torch::kLong).to(mesh_.device());
  const at::Tensor logits = forward_(ids.unsqueeze(0), &cache_);
  const at::Tensor row = logits.select(1, logits.size(1) - 1).select(0, 0);
  return tessera::is_dtensor(row) ? tessera::full_tensor(row) : row;
}

int64_t Generator::cache_bytes_here() const {
  int64_t bytes = 0;
  for (const LayerCache& layer : cache_.layers) {
    for (const at::Tensor& t : {layer.keys.all, layer.values.all}) {
      bytes += static_cast<int64_t>((tessera::is_dtensor(t) ? tessera::to_local(t) : t).nbytes());
    }
  }
  return bytes;
}
