
#include <ATen/Parallel.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/examples/embed/bert.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/world.h"
#include "tessera/styles/describe.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/embed/minilm.h"
#include "tessera/tests/harness/ranks.h"

namespace embed {
namespace {

using tessera::ColwiseParallel;
using tessera::RowwiseParallel;

tessera::ParallelPlan make_plan() {
  return {{"embeddings.word_embeddings", RowwiseParallel()},
          {"encoder.layer.*.attention.self.*", ColwiseParallel()},
          {"encoder.layer.*.attention.output.dense", RowwiseParallel()},
          {"encoder.layer.*.intermediate.dense", ColwiseParallel()},
          {"encoder.layer.*.output.dense", RowwiseParallel()}};
}

// Bytes of float weights that a rank of n may hold at most: 1/n of the sharded ones, rounded up to whole rows (or
// columns), and the replicated ones.
int64_t most_bytes(int64_t n) {
  const auto part = [n](int64_t rows) { return (rows + n - 1) / n; };
  const int64_t tables = part(30522) * 384 + (512 + 2) * 384;
  const int64_t norms = (1 + 2 * 6) * 2 * 384;
  const int64_t attention = 3 * part(384) * (384 + 1) + 384 * part(384) + 384;
  const int64_t feed_forward = part(1536) * (384 + 1) + 384 * part(1536) + 384;
  return 4 * (tables + norms + 6 * (attention + feed_forward));
}

void check_weight_bytes(torch::nn::Module& model, int64_t ranks) {
  const tessera::Description description = tessera::describe(model);
  CHECK(description.bytes_global() == most_bytes(1));
  CHECK(description.bytes_here() <= most_bytes(ranks));
  CHECK(description.bytes_here() >
        most_bytes(ranks) - 4 * 384 * ranks);  // the last rank's table is up to ranks - 1 rows shorter
}

void check_collectives(const tessera::CommCounter& counter, int64_t ranks) {
  CHECK(counter.total() == (ranks == 1 ? 0 : 1 + 2 * 6));
  CHECK(counter.count("all_reduce") == counter.total());
  if (ranks == 1) return;
  CHECK(counter.count_by_path("embeddings.word_embeddings.weight") == 1);
  CHECK(counter.count_by_path("encoder.layer.3.attention.output.dense.weight") == 1);
  CHECK(counter.count_by_path("encoder.layer.3.output.dense.weight") == 1);
}

TESSERA_RANKS_TEST_CASE(
    "MiniLM on every rank: one all-reduce for the words, two a layer, a share of the weights, Python's vectors",
    tessera::testing::Ranks({1, 2, 3, 4, 6}).time_limit(std::chrono::seconds(120))) {
  at::set_num_threads(1);
  const at::NoGradGuard no_grad;
  const int64_t ranks = tessera::testing::world()->size();
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {ranks}, {"tp"}, tessera::testing::world());
  const Reference reference = read_reference();
  const Inputs inputs = inputs_of(reference.texts);

  BertModel model;
  model->eval();
  auto parallel = tessera::parallelize_module(model, mesh, make_plan(), {.src_rank = tessera::kNoSource});
  load_minilm(*model);
  check_weight_bytes(*model, ranks);

  const tessera::Strict strict;
  const tessera::CommCounter counter(mesh);
  const at::Tensor states = parallel(inputs.ids, inputs.mask);
  check_collectives(counter, ranks);
  CHECK(states.sizes() == at::IntArrayRef({inputs.ids.size(0), inputs.ids.size(1), 384}));
  const at::Tensor vectors = sentence_vectors(tessera::full_tensor(states), inputs.mask);
  CHECK(smallest_cosine(vectors, reference.vectors) >= 0.99999);
  CHECK((vectors - reference.vectors).abs().max().item<float>() < 1e-5F);
}

}  // namespace
}  // namespace embed
