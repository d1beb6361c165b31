// The main job: sentences through all-MiniLM-L6-v2 on n processes, each with its part of the weights, and the same
// numbers as one process. Start it with tools/demo, tools/launch, torchrun or mpirun; alone it is a job of one process.

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <CLI/CLI.hpp>

#include "tessera/dtensor/agreement.h"
#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/weights.h"
#include "tessera/examples/embed/bert.h"
#include "tessera/examples/embed/report.h"
#include "tessera/examples/embed/sentences.h"
#include "tessera/examples/embed/tokenizer.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/world.h"
#include "tessera/styles/describe.h"
#include "tessera/styles/parallelize.h"

namespace {

// Returns which modules are sharded how. A module that no pattern names has all of its parameters on every rank.
tessera::ParallelPlan make_plan() {
  using tessera::ColwiseParallel;
  using tessera::RowwiseParallel;
  return {
      {"embeddings.word_embeddings", RowwiseParallel()},
      {"encoder.layer.*.attention.self.query", ColwiseParallel()},
      {"encoder.layer.*.attention.self.key", ColwiseParallel()},
      {"encoder.layer.*.attention.self.value", ColwiseParallel()},
      {"encoder.layer.*.attention.output.dense", RowwiseParallel()},
      {"encoder.layer.*.intermediate.dense", ColwiseParallel()},
      {"encoder.layer.*.output.dense", RowwiseParallel()},
  };
}

struct Options {
  std::string text;
  std::string weights;
  std::string vocab;
};

// Writes to standard output on rank 0, and nothing on other ranks.
class Output {
 public:
  explicit Output(bool is_shown) : is_shown_(is_shown) {}
  bool is_shown() const { return is_shown_; }
  void line(const std::string& text) const {
    if (is_shown_) std::cout << text << std::endl;
  }
  void part(const std::string& title, const std::string& body) const { line(fmt::format("{}\n{}", title, body)); }

 private:
  bool is_shown_;
};

constexpr int64_t kAtOnce = 64;           // sentences of one forward
constexpr std::size_t kMostInTable = 40;  // sentences whose similarities are all printed

struct Sentences {
  std::vector<std::string> texts;
  at::Tensor ids;   // int64 [sentences, length of the longest]
  at::Tensor mask;  // int64, 1 for a token, 0 for padding
};

std::vector<std::string> read_sentences(const std::string& path) {
  if (path.empty()) return {embed::kSentences.begin(), embed::kSentences.end()};
  if (std::filesystem::is_directory(path)) {
    throw std::invalid_argument(fmt::format("--text: '{}' is a folder; name a file of sentences", path));
  }
  std::ifstream file(path);
  if (!file) throw std::invalid_argument(fmt::format("--text: cannot read '{}'", path));
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    if (line.ends_with('\r')) line.pop_back();
    if (line.find_first_not_of(" \t") != std::string::npos) lines.push_back(line);
  }
  if (lines.empty()) throw std::invalid_argument(fmt::format("--text: '{}' has no sentence; write one per line", path));
  return lines;
}

Sentences make_sentences(const Options& options) {
  Sentences out{.texts = read_sentences(options.text), .ids = {}, .mask = {}};
  const embed::Batch batch = embed::Tokenizer::from_file(options.vocab).encode_batch(out.texts);
  out.ids = at::tensor(batch.ids, at::kLong).view({batch.sentences, batch.length});
  out.mask = at::tensor(batch.mask, at::kLong).view({batch.sentences, batch.length});
  return out;
}

// The file also holds BERT's pooler and position numbers, which sentence vectors do not use.
void load(torch::nn::Module& model, const std::string& path, std::function<void(int64_t, int64_t)> progress = {}) {
  tessera::load_weights(model, path, {.allow_unexpected = true, .progress = std::move(progress)});
}

// Returns a function that shows progress: on a terminal in one line that it overwrites, elsewhere in one line per
// quarter.
std::function<void(int64_t, int64_t)> progress_line(const Output& output) {
  if (!output.is_shown()) return {};
  return [is_terminal = isatty(STDOUT_FILENO) == 1, next = int64_t{0}](int64_t done, int64_t total) mutable {
    const int64_t percent = total > 0 ? 100 * done / total : 100;
    if (percent < next) return;
    next = is_terminal ? percent + 1 : (percent / 25 + 1) * 25;
    const char* const end = is_terminal && done < total ? "\r" : "\n";
    std::cout << fmt::format("loading this rank's weights: {:>3}%, {} of {} bytes{}", percent, embed::with_commas(done),
                             embed::with_commas(total), end)
              << std::flush;
  };
}

// Returns the bytes of each rank, in order. Communication: one all_gather of 8 bytes per rank.
std::vector<int64_t> weight_bytes_of_ranks(const tessera::Description& here, const tessera::DeviceMesh& mesh) {
  const at::Tensor all = tessera::all_gather(at::tensor({here.bytes_here()}, at::kLong), mesh, 0).contiguous();
  return {all.const_data_ptr<int64_t>(), all.const_data_ptr<int64_t>() + all.numel()};
}

// The heads must divide evenly. Otherwise a rank would hold a part of a head, and attention would have to communicate.
void check_ranks(int64_t ranks) {
  const int64_t heads = embed::BertConfig().heads;
  if (heads % ranks == 0) return;
  throw std::invalid_argument(
      fmt::format("{} attention heads do not divide over {} ranks; start 1, 2, 3, 4, 6 or 12", heads, ranks));
}

// Returns the sentences' vectors, some sentences after the others. `forward` takes ids and a mask.
at::Tensor vectors_by(const std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>& forward,
                      const Sentences& sentences) {
  std::vector<at::Tensor> all;
  for (int64_t first = 0; first < sentences.ids.size(0); first += kAtOnce) {
    const int64_t count = std::min(kAtOnce, sentences.ids.size(0) - first);
    const at::Tensor ids = sentences.ids.narrow(0, first, count), mask = sentences.mask.narrow(0, first, count);
    all.push_back(embed::sentence_vectors(forward(ids, mask), mask));
  }
  return at::cat(all);
}

// Returns the vectors that a plain model in this process computes. No communication.
at::Tensor vectors_of_one_process(const Sentences& sentences, const std::string& weights) {
  embed::BertModel model;
  model->eval();
  load(*model, weights);
  return vectors_by([&](const at::Tensor& ids, const at::Tensor& mask) { return model(ids, mask); }, sentences);
}

void show_similarities(const Output& output, const Sentences& sentences, const at::Tensor& vectors) {
  const at::Tensor similarities = vectors.mm(vectors.t()).contiguous();
  const int64_t count = similarities.size(0);
  embed::Matrix matrix;
  for (int64_t i = 0; i < count; ++i) {
    const float* const row = similarities.const_data_ptr<float>() + i * count;
    matrix.emplace_back(row, row + count);
  }
  if (sentences.texts.size() <= kMostInTable) {
    output.part("similarities", embed::similarity_table(sentences.texts, matrix));
  }
  output.part("the nearest sentence to each", embed::nearest_table(sentences.texts, matrix));
}

void show_plan(const Output& output, const tessera::DeviceMesh& mesh, const tessera::ParallelPlan& plan) {
  output.part(fmt::format("plan on {}", mesh.to_string()), tessera::to_string(plan));
}

// Loads the parallel model, runs it and shows its weights and collectives. Returns the sentences' vectors as a plain
// tensor.
at::Tensor vectors_of_all_ranks(const Sentences& sentences, const Options& options, const tessera::DeviceMesh& mesh,
                                const Output& output) {
  embed::BertModel model;
  model->eval();
  // With kNoSource nothing is sent, since the file's values replace all random values of the new model.
  auto parallel = tessera::parallelize_module(model, mesh, make_plan(), {.src_rank = tessera::kNoSource});
  load(*model, options.weights, progress_line(output));
  const tessera::Description description = tessera::describe(*model);
  output.part("weights on rank 0", tessera::to_string(description));
  output.part("weight bytes",
              embed::weight_table(weight_bytes_of_ranks(description, mesh), description.bytes_global()));

  const tessera::Strict strict;
  const auto forward = [&](const at::Tensor& ids, const at::Tensor& mask) {
    return tessera::full_tensor(parallel(ids, mask));
  };
  const tessera::CommCounter counter(mesh);
  const at::Tensor vectors = vectors_by(forward, sentences);
  const int64_t forwards = (sentences.ids.size(0) + kAtOnce - 1) / kAtOnce;
  output.part(forwards == 1 ? fmt::format("collectives of one forward: {}", counter.total())
                            : fmt::format("collectives of {} forwards: {}", forwards, counter.total()),
              counter.to_string());
  return vectors;
}

int run(const Options& options, const std::shared_ptr<tessera::World>& world, const Output& output) {
  check_ranks(world->size());
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {  // mpirun and srun leave it to the program
    at::set_num_threads(std::max(1, at::get_num_threads() / static_cast<int>(world->local_size())));
  }
  const at::NoGradGuard no_grad;
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {world->size()}, {"tp"}, world);
  Sentences sentences;
  tessera::Agreement({mesh}, "embed")
      .run([&] { sentences = make_sentences(options); },
           [&] {
             const auto* const ids = sentences.ids.const_data_ptr<int64_t>();
             return fmt::format("{}", fmt::join(ids, ids + sentences.ids.numel(), " "));
           },
           "the ranks read different sentences or vocabularies; all of them need the same files");
  show_plan(output, mesh, make_plan());
  const at::Tensor vectors = vectors_of_all_ranks(sentences, options, mesh, output);
  // No rank communicates from here on, so rank 0 may do what the others do not.
  if (!output.is_shown()) return 0;
  show_similarities(output, sentences, vectors);
  const at::Tensor difference = (vectors - vectors_of_one_process(sentences, options.weights)).abs().max();
  output.line(embed::difference_line(difference.item<float>()));
  return embed::is_close_enough(difference.item<float>()) ? 0 : 1;
}

void add_options(CLI::App& app, Options& options) {
  // The last value wins, so that users can override the arguments that tools/demo passes.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option("--text", options.text,
                 "A file of sentences, one per line, each cut to 256 tokens; without it, built-in sentences are used");
  app.add_option("--weights", options.weights,
                 "model.safetensors of all-MiniLM-L6-v2 or its folder; tools/demo passes it")
      ->required();
  app.add_option("--vocab", options.vocab, "vocab.txt of all-MiniLM-L6-v2; tools/demo passes it")->required();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto world = tessera::World::from_environment();
    const Output output(world->rank() == 0);
    Options options;
    CLI::App app("Sentence vectors of all-MiniLM-L6-v2 on several processes, compared with one");
    add_options(app, options);
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      // Every rank has the same arguments, so only rank 0 prints the error or the help.
      return output.is_shown() ? app.exit(error) : error.get_exit_code();
    }
    return run(options, world, output);
  } catch (const std::exception& error) {
    std::cerr << "embed: " << error.what() << std::endl;
    return 1;
  }
}
