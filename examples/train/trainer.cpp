#include "tessera/examples/train/trainer.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <numbers>
#include <random>
#include <stdexcept>
#include <string_view>
#include <utility>

#include <ATen/autocast_mode.h>
#include <c10/core/Device.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include "tessera/dtensor/clip_grad_norm.h"
#include "tessera/dtensor/deferred/sharded_init.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/gradient_buckets.h"
#include "tessera/dtensor/random.h"
#include "tessera/examples/language_model/parallel_plan.h"
#include "tessera/examples/language_model/transformer.h"
#include "tessera/layers/activation_checkpoint.h"
#include "tessera/mesh/recorder.h"
#include "tessera/styles/parallelize.h"

namespace train {
namespace {

using tessera::Placements;
using tessera::Replicate;
using tessera::Shard;

TransformerOptions model_options(const Options& options) {
  return {.hidden = options.hidden,
          .layers = options.layers,
          .heads = options.heads,
          .sequence = options.sequence,
          .dropout = options.dropout,
          .tied = options.is_tied};
}

bool has_bfloat16() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("flags")) {
      return line.find("avx512_bf16") != std::string::npos || line.find("amx_bf16") != std::string::npos;
    }
  }
  return false;
}

// While it lives, layers compute in bfloat16 where they can.
class Autocast {
 public:
  Autocast(bool is_on, c10::DeviceType device)
      : is_on_(is_on), device_(device), dtype_(at::autocast::get_autocast_dtype(device)) {
    if (!is_on_) return;
    at::autocast::set_autocast_dtype(device_, at::kBFloat16);
    at::autocast::set_autocast_enabled(device_, true);
  }
  ~Autocast() {
    if (!is_on_) return;
    at::autocast::set_autocast_enabled(device_, false);
    at::autocast::set_autocast_dtype(device_, dtype_);
    at::autocast::clear_cache();
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  bool is_on_;
  c10::DeviceType device_;
  at::ScalarType dtype_;
};

// Decays matrices alone: a norm's weight and a bias are no matrices.
std::vector<torch::optim::OptimizerParamGroup> parameter_groups(const Transformer& model, const Options& options) {
  std::vector<at::Tensor> matrices, others;
  for (const at::Tensor& each : model->parameters()) (each.dim() >= 2 ? matrices : others).push_back(each);
  const auto group = [&](std::vector<at::Tensor> parameters, double decay) {
    return torch::optim::OptimizerParamGroup(
        std::move(parameters),
        std::make_unique<torch::optim::AdamWOptions>(
            torch::optim::AdamWOptions(options.learning_rate).betas({0.9, 0.95}).weight_decay(decay)));
  };
  return {group(std::move(matrices), options.weight_decay), group(std::move(others), 0.0)};
}

// Sets what the options say, which a checkpoint of a run with other options has replaced.
void set_options(torch::optim::Optimizer& optimizer, double learning_rate, double weight_decay) {
  auto& groups = optimizer.param_groups();
  for (auto& group : groups) group.options().set_lr(learning_rate);
  static_cast<torch::optim::AdamWOptions&>(groups.front().options()).weight_decay(weight_decay);
}

// Is in the traces of the mesh's World as a span while it lives. Without a mesh it does nothing.
class PartOfStep {
 public:
  PartOfStep(const std::optional<tessera::DeviceMesh>& mesh, std::string_view name) {
    if (mesh) span_.emplace(mesh->world().recorder(), name);
  }

 private:
  std::optional<tessera::Recorder::Span> span_;
};

}  // namespace

std::string compute_dtype(const Options& options) {
  if (options.dtype != "auto") return options.dtype;
  return options.device == "cuda" || has_bfloat16() ? "bfloat16" : "float32";
}

double learning_rate_of(const Options& options, int64_t step) {
  if (step < options.warm_up) {
    return options.learning_rate * static_cast<double>(step + 1) / static_cast<double>(options.warm_up);
  }
  const double done = static_cast<double>(step - options.warm_up) /
                      static_cast<double>(std::max<int64_t>(1, options.steps - options.warm_up));
  return options.learning_rate * (0.1 + 0.45 * (1 + std::cos(std::numbers::pi * std::min(done, 1.0))));
}

struct Trainer::Parts {
  Options options;
  std::optional<tessera::DeviceMesh> mesh;
  c10::Device device = at::kCPU;
  Transformer model{nullptr};
  std::unique_ptr<torch::optim::AdamW> optimizer;

  // Returns this rank's rows of a tensor of `rows` rows as that tensor.
  at::Tensor whole_of(const at::Tensor& rows_here, int64_t rows) const {
    if (!mesh) return rows_here;
    return tessera::from_local(rows_here, *mesh, placements(), {.shape = {{rows, rows_here.size(1)}}});
  }
  static Placements placements() { return {Shard(0), Replicate()}; }

  std::vector<int64_t> local(const tessera::GlobalBatches& batches, int64_t step, int64_t index, int64_t count) const {
    if (!mesh) return batches.micro_batch(step, index, count);
    return batches.local(step, *mesh, placements(), index, count);
  }

  // [batch, sequence] -> [batch, sequence, vocabulary], in the dtype of the parameters.
  at::Tensor logits(const at::Tensor& ids) {
    const tessera::ImplicitReplication plain_positions;
    at::Tensor out;
    {
      const Autocast autocast(compute_dtype(options) == "bfloat16", device.type());
      out = model->is_training() && options.has_activation_checkpoints ? checkpointed(ids) : model(ids);
    }
    return out.to(model->norm->weight.scalar_type());
  }

  // Does what the model's forward does, and keeps no block's intermediate results.
  at::Tensor checkpointed(const at::Tensor& ids) {
    at::Tensor x = model->drop(model->tok(ids) + model->pos(torch::arange(ids.size(1), ids.options())));
    for (const auto& layer : *model->layers) {
      const auto block = [layer](const at::Tensor& h) { return layer->as<Block>()->forward(h); };
      x = tessera::checkpoint(block, x);
    }
    return model->head(model->norm(x));
  }

  // Returns the sum or the mean of the losses of all bytes.
  at::Tensor loss(const at::Tensor& ids, const at::Tensor& targets, at::Reduction::Reduction reduction) {
    return torch::cross_entropy_loss(logits(ids).flatten(0, 1), targets.flatten(), {}, reduction);
  }
};

Trainer::Trainer(const Options& options, std::optional<tessera::DeviceMesh> mesh) : parts_(std::make_unique<Parts>()) {
  parts_->options = options;
  parts_->mesh = std::move(mesh);
  parts_->device = parts_->mesh ? parts_->mesh->device() : c10::Device(options.device);
  torch::manual_seed(static_cast<uint64_t>(options.seed));
  {
    std::optional<tessera::ShardedInit> in_shards;
    if (options.is_dry_run && parts_->mesh) in_shards.emplace(*parts_->mesh);
    parts_->model = Transformer(model_options(options));
    // The first values are drawn on the CPU: they are the same on every device.
    parts_->model->to(parts_->device, compute_dtype(options) == "float64" ? at::kDouble : at::kFloat);
  }
  if (parts_->mesh) {
    tessera::manual_seed(static_cast<uint64_t>(options.seed), parts_->mesh->world());
    tessera::ParallelizeOptions how;
    if (options.zero > 0) {
      how.data_placement = Shard(0);
      how.zero_stage = options.zero;
    }
    tessera::parallelize_module(parts_->model, *parts_->mesh, sequence_parallel_plan(), how);
  }
  parts_->optimizer = std::make_unique<torch::optim::AdamW>(parameter_groups(parts_->model, options));
}

Trainer::~Trainer() = default;

torch::nn::Module& Trainer::module() { return *parts_->model; }
torch::optim::Optimizer& Trainer::optimizer() { return *parts_->optimizer; }
std::string Trainer::plan() const { return tessera::to_string(sequence_parallel_plan()); }

void check_finite(const StepResult& result, int64_t step) {
  const auto loss = result.loss.item<double>(), gradient_norm = result.gradient_norm.item<double>();
  if (std::isfinite(loss) && std::isfinite(gradient_norm)) return;
  throw std::runtime_error(
      fmt::format("step {} has the loss {} and gradients of norm {}; the run stops, and the step is not saved. Go on "
                  "after the last checkpoint with a lower --learning-rate",
                  step + 1, loss, gradient_norm));
}

StepResult Trainer::compute_gradients(const Windows& windows, const tessera::GlobalBatches& batches, int64_t step) {
  Parts& parts = *parts_;
  const int64_t count = parts.options.accumulate, rows = batches.batch_size() / count;
  StepResult result{.loss = {}, .gradient_norm = {}, .learning_rate = learning_rate_of(parts.options, step)};
  parts.model->train();
  parts.optimizer->zero_grad();
  for (int64_t index = 0; index < count; ++index) {
    at::Tensor loss;
    {
      const PartOfStep forward(parts.mesh, "forward");
      const auto [ids, targets] = windows.batch(parts.local(batches, step, index, count), parts.device);
      loss = parts.loss(parts.whole_of(ids, rows), parts.whole_of(targets, rows), at::Reduction::Mean) / count;
    }
    const PartOfStep backward(parts.mesh, "backward");
    std::optional<tessera::AccumulateGradients> not_yet_reduced;
    if (parts.mesh && index + 1 < count) not_yet_reduced.emplace(*parts.mesh);
    loss.backward();
    const at::Tensor here = loss.detach().to(at::kDouble);
    result.loss = result.loss.defined() ? result.loss + here : here;
  }
  if (parts.mesh) result.loss = tessera::full_tensor(result.loss);  // an all-reduce: every rank calls it
  const PartOfStep clip(parts.mesh, "clip");
  const double largest = parts.options.clip > 0 ? parts.options.clip : std::numeric_limits<double>::infinity();
  const std::vector<at::Tensor> parameters = parts.model->parameters();
  result.gradient_norm = parts.device.is_cuda()
                             ? tessera::clip_grad_norm_on_device_(parameters, largest)
                             : torch::tensor(tessera::clip_grad_norm_(parameters, largest), at::kDouble);
  return result;
}

StepResult Trainer::step(const Windows& windows, const tessera::GlobalBatches& batches, int64_t step) {
  StepResult result = compute_gradients(windows, batches, step);
  if (!parts_->device.is_cuda()) check_finite(result, step);
  const PartOfStep optimizer(parts_->mesh, "optimizer");
  set_options(*parts_->optimizer, result.learning_rate, parts_->options.weight_decay);
  parts_->optimizer->step();
  return result;
}

double Trainer::bits_per_byte(const Windows& windows, const std::vector<int64_t>& samples) {
  constexpr std::size_t kRows = 64;
  const torch::NoGradGuard no_gradient;
  Parts& parts = *parts_;
  parts.model->eval();
  at::Tensor nats = torch::zeros({}, torch::dtype(at::kDouble).device(parts.device));
  for (std::size_t begin = 0; begin < samples.size(); begin += kRows) {
    const std::vector<int64_t> rows(
        samples.begin() + static_cast<std::ptrdiff_t>(begin),
        samples.begin() + static_cast<std::ptrdiff_t>(std::min(begin + kRows, samples.size())));
    // One batch in the order of `rows`, of which this rank takes its part.
    std::vector<int64_t> here = rows;
    const auto count = static_cast<int64_t>(rows.size());
    if (parts.mesh) {
      const tessera::Interval mine = tessera::rows_here(count, *parts.mesh, Parts::placements());
      here.assign(rows.begin() + mine.begin, rows.begin() + mine.end);
    }
    const auto [ids, targets] = windows.batch(here, parts.device);
    at::Tensor sum = parts.loss(parts.whole_of(ids, count), parts.whole_of(targets, count), at::Reduction::Sum);
    if (parts.mesh) sum = tessera::full_tensor(sum);
    nats += sum;
  }
  return nats.item<double>() / std::numbers::ln2 /
         static_cast<double>(static_cast<int64_t>(samples.size()) * windows.sequence());
}

std::string Trainer::write(const std::string& prompt, int64_t count, double temperature, uint64_t seed) {
  const torch::NoGradGuard no_gradient;
  Parts& parts = *parts_;
  parts.model->eval();
  std::mt19937_64 generator(seed);
  std::string text = prompt;
  for (int64_t i = 0; i < count; ++i) {
    const auto length = std::min<int64_t>(parts.options.sequence, static_cast<int64_t>(text.size()));
    at::Tensor ids = torch::empty({1, length}, at::kLong);
    for (int64_t j = 0; j < length; ++j) {
      ids[0][j] =
          static_cast<int64_t>(static_cast<unsigned char>(text[text.size() - static_cast<std::size_t>(length - j)]));
    }
    ids = ids.to(parts.device);
    if (parts.mesh) ids = tessera::from_local(ids, *parts.mesh, {Replicate(), Replicate()});
    at::Tensor last = parts.logits(ids).select(0, 0).select(0, length - 1);
    if (parts.mesh) last = tessera::full_tensor(last);
    const at::Tensor sums = torch::softmax(last.cpu().to(at::kDouble) / temperature, 0).cumsum(0);
    const double drawn = std::uniform_real_distribution<double>(0.0, 1.0)(generator) * sums[-1].item<double>();
    at::Tensor next = torch::searchsorted(sums, torch::tensor({drawn}, at::kDouble)).clamp_max(sums.size(0) - 1);
    // Where ranks round differently, they go on with what the first one has drawn.
    if (parts.mesh) {
      next = tessera::full_tensor(tessera::distribute_tensor(next, *parts.mesh, {Replicate(), Replicate()}));
    }
    text += static_cast<char>(next.item<int64_t>());
  }
  return text.substr(prompt.size());
}

}  // namespace train
