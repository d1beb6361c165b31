#include "tessera/bench/generate_rank.h"

#include <cstdint>
#include <functional>
#include <map>
#include <sstream>
#include <utility>

#include <fmt/format.h>
#include <torch/torch.h>

#include "tessera/bench/measure.h"
#include "tessera/bench/rank_server.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/examples/generate/sampling.h"
#include "tessera/examples/language_model/parallel_plan.h"
#include "tessera/examples/language_model/transformer.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/styles/parallelize.h"

namespace tessera::bench {
namespace {

TransformerOptions parse_case(const std::string& text) {
  TransformerOptions options;
  std::istringstream(text) >> options.hidden >> options.layers >> options.heads >> options.sequence;
  return options;
}

Transformer make_model(const TransformerOptions& options) {
  torch::manual_seed(1);
  Transformer model(options);
  model->eval();
  return model;
}

// Writes one token after another.
class Writer {
 public:
  using Forward = std::function<at::Tensor(const at::Tensor& ids, KeyValueCache* cache)>;

  Writer(Forward forward, int64_t sequence, DeviceMesh mesh)
      : forward_(std::move(forward)), sequence_(sequence), mesh_(std::move(mesh)) {
    restart();
  }

  // Forgets what was written, and begins with half of the positions filled.
  void restart() {
    cache_.length = 0;
    next_ = likeliest(torch::arange(sequence_ / 2, torch::kLong).unsqueeze(0));
  }

  int64_t token() {
    if (cache_.length == sequence_) cache_.length = sequence_ / 2;
    next_ = likeliest(torch::tensor({next_}, torch::kLong).unsqueeze(0));
    return next_;
  }

 private:
  int64_t likeliest(const at::Tensor& ids) {
    const at::Tensor logits = forward_(ids, &cache_);
    const at::Tensor row = logits.select(1, logits.size(1) - 1).select(0, 0);
    return choose_token(is_dtensor(row) ? full_tensor(row) : row, {}, mesh_);
  }

  Forward forward_;
  int64_t sequence_;
  DeviceMesh mesh_;
  KeyValueCache cache_;
  int64_t next_ = 0;
};

Writer make_writer(const std::string& way, const TransformerOptions& options, const DeviceMesh& mesh) {
  Transformer model = make_model(options);
  if (way == "plain") {
    return Writer([model](const at::Tensor& ids, KeyValueCache* cache) mutable { return model(ids, cache); },
                  options.sequence, mesh);
  }
  auto cut = parallelize_module(model, mesh, parallel_plan(options), {.src_rank = kNoSource});
  return Writer([cut](const at::Tensor& ids, KeyValueCache* cache) mutable { return cut(ids, cache); },
                options.sequence, mesh);
}

std::string text_of(Writer& writer) {
  writer.restart();
  std::string out;
  for (int i = 0; i < 16; ++i) out += fmt::format("{} ", writer.token());
  return out;
}

}  // namespace

void serve_generate(const std::string& socket) {
  at::set_num_threads(1);
  const torch::NoGradGuard no_gradient;
  const auto world = World::from_environment();
  const DeviceMesh mesh = init_device_mesh("cpu", {world->size()}, {"tp"}, world);
  TransformerOptions options;
  std::map<std::string, Writer> writers;
  const auto writer = [&](const std::string& way) -> Writer& {
    if (!writers.contains(way)) writers.emplace(way, make_writer(way, options, mesh));
    return writers.at(way);
  };
  serve(socket, *world, [&](const std::string& what, const std::string& rest) -> std::string {
    if (what == "case") {
      writers.clear();
      options = parse_case(rest);
      return "ok";
    }
    if (what == "text") return text_of(writer(rest));
    Writer& measured = writer(what);
    barrier(mesh, 0);
    return fmt::format("{}", time_calls([&] { measured.token(); }, std::stoi(rest)));
  });
}

}  // namespace tessera::bench
