// Compares what is generated on ranks with what one plain model gives, and looks at what each of them holds.

#include "tessera/examples/generate/generator.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <stdexcept>
#include <vector>

#include <doctest/doctest.h>
#include <torch/torch.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/examples/generate/sampling.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/styles/describe.h"
#include "tessera/tests/generate/small_model.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/tp_line.h"
#include "tessera/tools/launcher/private_folder.h"

namespace {

using tessera::testing::tp_line;
using tessera::testing::world;
using tessera::testing::world_size;

using Tokens = std::vector<int64_t>;

Generator::Forward plain_forward(Transformer model) {
  return [model](const at::Tensor& ids, KeyValueCache* cache) mutable { return model(ids, cache); };
}

Generator::Forward parallel_forward(ParallelTransformer model) {
  return [model](const at::Tensor& ids, KeyValueCache* cache) mutable { return model(ids, cache); };
}

Tokens generated(Generator generator, const Tokens& prompt, const GenerateOptions& options) {
  Tokens out;
  generator.generate(prompt, options, [&](int64_t token) { out.push_back(token); });
  return out;
}

// Returns the likeliest token after the last `sequence` tokens of `text`, or after the last half of them where the
// cache was filled anew: the specification of Generator, without a cache.
Tokens greedy_without_cache(Transformer& model, Tokens text, int64_t tokens) {
  const int64_t sequence = model->options.sequence;
  int64_t seen = std::min<int64_t>(std::ssize(text), sequence);
  Tokens out;
  for (int64_t i = 0; i < tokens; ++i) {
    if (seen > sequence) seen = sequence / 2;
    const at::Tensor ids = torch::tensor(Tokens(text.end() - seen, text.end())).unsqueeze(0);
    out.push_back(model(ids).select(1, seen - 1).argmax().item<int64_t>());
    text.push_back(out.back());
    ++seen;
  }
  return out;
}

// Saves a model and loads it on all ranks. Every rank has a folder of its own.
ParallelTransformer reloaded(Transformer& model, at::ScalarType dtype, const tessera::DeviceMesh& mesh) {
  const tessera::PrivateFolder folder;
  save_small_model(model, folder.path(), 1);
  return load_model(model->options, folder.path() + "/step_00000001", at::kFloat, dtype, mesh);
}

const Tokens kPrompt = {3, 1, 4, 1, 5};
constexpr int64_t kTokens = 24;  // the model has 16 positions: the cache is filled anew twice

}  // namespace

TEST_CASE(
    "generation in one process takes the likeliest token after what the cache holds, whatever the prompt's length") {
  const torch::NoGradGuard no_gradient;
  Transformer model = small_model(small_options());
  Tokens longer;
  for (int64_t i = 0; i < 21; ++i) longer.push_back(i * 7 % 29);
  for (const Tokens& prompt : {Tokens{2}, kPrompt, Tokens(longer.begin(), longer.begin() + 16), longer}) {
    CAPTURE(prompt.size());
    const tessera::DeviceMesh mesh =
        tessera::init_device_mesh("cpu", {1}, {"tp"}, tessera::World::fake(/*rank=*/0, /*size=*/1));
    const Generator generator(plain_forward(model), model->options.sequence, mesh);
    const Tokens want = greedy_without_cache(model, prompt, kTokens);
    CHECK(generated(generator, prompt, {.tokens = kTokens}) == want);
    CHECK(generated(generator, prompt, {.tokens = 0}).empty());
    // Generation ends before the stop token.
    const auto first = std::find(want.begin(), want.end(), want[12]);
    CHECK(generated(generator, prompt, {.tokens = kTokens, .stop = want[12]}) == Tokens(want.begin(), first));
  }
}

TESSERA_RANKS_TEST_CASE("greedy text in float64 is the plain model's on any number of ranks; the cache is cut by heads",
                        {1, 2, 3, 4}) {
  const torch::NoGradGuard no_gradient;
  const tessera::DeviceMesh mesh = tp_line();
  for (const bool tied : {false, true}) {
    CAPTURE(tied);
    TransformerOptions options = small_options();
    options.tied = tied;
    Transformer plain = small_model(options);
    const Tokens want = greedy_without_cache(plain, kPrompt, kTokens);
    // A tied model of random values repeats the last token.
    CHECK(std::set<int64_t>(want.begin(), want.end()).size() > (tied ? 0 : 3));
    Generator generator(parallel_forward(reloaded(plain, torch::kDouble, mesh)), options.sequence, mesh);
    Tokens got;
    const tessera::CommCounter counter(mesh);
    generator.generate(kPrompt, {.tokens = kTokens}, [&](int64_t token) { got.push_back(token); });
    CHECK(got == want);
    // For each token one all-reduce of the embedding, two a layer, and one all-gather of the logits.
    const int64_t many = world_size() > 1 ? 1 : 0;
    CHECK(counter.count("all_reduce") == many * kTokens * (1 + 2 * options.layers));
    CHECK(counter.count("all_gather") == many * kTokens);
    CHECK(counter.total() == many * kTokens * (2 + 2 * options.layers));
    const int64_t heads = small_heads_of_ranks(world_size())[static_cast<std::size_t>(world()->rank())];
    CHECK(generator.cache_bytes_here() == heads * 8 * 2 * options.layers * options.sequence * 4);
  }
}

TESSERA_RANKS_TEST_CASE("greedy text in float32 differs only where the two largest logits lie within 1e-4",
                        {1, 2, 3, 4}) {
  const torch::NoGradGuard no_gradient;
  const tessera::DeviceMesh mesh = tp_line();
  Transformer plain = small_model(small_options());
  const ParallelTransformer parallel = reloaded(plain, torch::kFloat, mesh);
  plain->to(torch::kFloat);
  const Generator generator(parallel_forward(parallel), plain->options.sequence, mesh);
  for (int64_t start = 0; start < 29; start += 7) {
    // Up to the length of the model: then all tokens before are seen, and the logits say how close a choice was.
    const Tokens got = generated(generator, {start}, {.tokens = 15}), want = greedy_without_cache(plain, {start}, 15);
    const auto [a, b] = std::mismatch(got.begin(), got.end(), want.begin());
    if (a == got.end()) continue;
    Tokens before = {start};
    before.insert(before.end(), want.begin(), b);
    const at::Tensor two = std::get<0>(plain(torch::tensor(before).unsqueeze(0)).select(1, -1).flatten().topk(2));
    CHECK((two[0] - two[1]).item<double>() <= 1e-4);
  }
  CHECK(generated(generator, {0}, {.tokens = 15}).size() == 15);
}

TESSERA_RANKS_TEST_CASE("a loaded model: every rank holds its part of the weights, in the dtype asked for",
                        {1, 2, 3, 4}) {
  const tessera::DeviceMesh mesh = tp_line();
  const TransformerOptions options = small_options();
  Transformer plain = small_model(options);
  const ParallelTransformer parallel = reloaded(plain, torch::kFloat, mesh);
  ParallelTransformer model = parallel;
  const int64_t ranks = world_size(), rank = world()->rank();
  const auto part = [&](int64_t size) {
    const int64_t each = (size + ranks - 1) / ranks;
    return std::clamp<int64_t>(size - rank * each, 0, each);
  };
  const int64_t h = options.hidden, features = 4 * small_heads_of_ranks(ranks)[static_cast<std::size_t>(rank)];
  const int64_t whole = options.sequence * h + (2 * options.layers + 1) * 2 * h + options.layers * 2 * h;
  const int64_t layer = 3 * features * (h + 1) + h * features + part(4 * h) * (h + 1) + h * part(4 * h);
  int64_t here = 0;
  for (const at::Tensor& p : model->parameters()) {
    CHECK((p.scalar_type() == torch::kFloat));
    here += tessera::to_local(p).numel();
  }
  CHECK(here == whole + 2 * part(options.vocabulary) * h + options.layers * layer);
  CHECK_FALSE(model->is_training());
}

TESSERA_RANKS_TEST_CASE("drawn text follows from the seed alone; one of the likeliest tokens is the likeliest",
                        {1, 2, 3, 4}) {
  const torch::NoGradGuard no_gradient;
  const tessera::DeviceMesh mesh = tp_line();
  Transformer plain = small_model(small_options());
  const Generator parallel(parallel_forward(reloaded(plain, torch::kDouble, mesh)), plain->options.sequence, mesh);
  const Generator alone(plain_forward(plain), plain->options.sequence, mesh);
  const auto drawn = [&](const Generator& generator, uint64_t seed, const Sampling& sampling) {
    tessera::manual_seed(seed, *world());
    return generated(generator, kPrompt, {.tokens = kTokens, .sampling = sampling});
  };
  const Tokens greedy = greedy_without_cache(plain, kPrompt, kTokens);
  for (const Sampling& sampling : {Sampling{.temperature = 1}, Sampling{.temperature = 3, .top_k = 5}}) {
    const Tokens first = drawn(parallel, 7, sampling);
    CHECK(first == drawn(parallel, 7, sampling));
    CHECK(first == drawn(alone, 7, sampling));
    CHECK(first != drawn(parallel, 8, sampling));
    CHECK(first != greedy);
  }
  CHECK(drawn(parallel, 7, {.temperature = 100, .top_k = 1}) == greedy);
  CHECK(drawn(parallel, 7, {.temperature = 1e-9}) == greedy);
}

TEST_CASE("choose_token: the share of each token is its probability, and few tokens are drawn with top_k") {
  const auto fake = tessera::World::fake(/*rank=*/0, /*size=*/1);
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {1}, {"tp"}, fake);
  tessera::manual_seed(5, *fake);
  const at::Tensor logits = torch::tensor({0.0, std::log(5.0), std::log(2.0), std::log(2.0)});
  const auto shares = [&](const Sampling& sampling) {
    std::vector<double> out(4, 0.0);
    for (int i = 0; i < 2000; ++i) out[static_cast<std::size_t>(choose_token(logits, sampling, mesh))] += 1.0 / 2000;
    return out;
  };
  // The standard deviation of a share is below 0.012.
  const auto close = [](const std::vector<double>& got, const std::vector<double>& want) {
    for (std::size_t i = 0; i < 4; ++i) {
      if (std::abs(got[i] - want[i]) > 0.06) return false;
    }
    return true;
  };
  CHECK(close(shares({.temperature = 1}), {0.1, 0.5, 0.2, 0.2}));
  CHECK(close(shares({.temperature = 0.5}), {1.0 / 34, 25.0 / 34, 4.0 / 34, 4.0 / 34}));
  CHECK(shares({.temperature = 1, .top_k = 3})[0] == 0);
  CHECK(shares({.temperature = 1, .top_k = 1}) == std::vector<double>{0, shares({})[1], 0, 0});
  CHECK(choose_token(logits, {}, mesh) == 1);
  CHECK_THROWS_AS(choose_token(torch::tensor({0.0, std::nan("")}), {}, mesh), std::runtime_error);
  CHECK_THROWS_AS(choose_token(torch::tensor({0.0, double{INFINITY}}), {.temperature = 1}, mesh), std::runtime_error);
}

TEST_CASE("a generator refuses an empty prompt") {
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {1}, {"tp"}, tessera::World::fake(0, 1));
  Generator generator(plain_forward(small_model(small_options())), 16, mesh);
  CHECK_THROWS_WITH_AS(generator.generate({}, {}, [](int64_t) {}),
                       "generate: the prompt is empty; give at least one token", std::invalid_argument);
}
