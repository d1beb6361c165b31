// Compares named layers and losses in float32 with float64 in one process: within 1e-5 of each tensor's largest
// magnitude.

#include <functional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/layers/parallel_dim.h"
#include "tessera/tests/dtensor/relative.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr double kTolerance = 1e-5;

at::Tensor in_double(const at::Tensor& t) {
  const at::Tensor plain = is_dtensor(t) ? full_tensor(t.detach()) : t.detach();
  return plain.to(at::kDouble).clone().requires_grad_(plain.is_floating_point());
}

void check_close(const at::Tensor& got, const at::Tensor& want) {
  CHECK(((is_dtensor(got) ? full_tensor(got.detach()) : got).scalar_type() == at::kFloat));
  const at::Tensor plain = is_dtensor(got) ? full_tensor(got.detach()) : got.detach();
  CHECK(close_to_scale(plain.to(at::kDouble), want.detach(), kTolerance));
}

using Parameters = std::vector<at::Tensor>;

// A layer applied to a whole input, and the same in one process with whole parameters.
struct Subject {
  std::string name;
  std::function<at::Tensor(const at::Tensor& x)> forward;
  std::function<at::Tensor(const at::Tensor& x, const Parameters& parameters)> dense;
  Parameters parameters;
};

void check_subject(const Subject& subject, const at::Tensor& input) {
  CAPTURE(subject.name);
  const bool trains = input.is_floating_point();
  const at::Tensor x = input.clone().requires_grad_(trains), want_x = trains ? in_double(input) : input;
  Parameters whole;
  for (const at::Tensor& each : subject.parameters) whole.push_back(in_double(each));
  const at::Tensor y = subject.forward(x), want = subject.dense(want_x, whole);
  check_close(y, want);
  const at::Tensor g = sample(want.sizes(), 9);
  want.backward(g);
  const at::Tensor mine = g.to(at::kFloat);
  y.backward(is_dtensor(y) ? spread(mine, mesh_of(y), placements_of(y)) : mine);
  if (trains) check_close(x.grad(), want_x.grad());
  for (std::size_t i = 0; i < whole.size(); ++i) check_close(subject.parameters[i].grad(), whole[i].grad());
}

at::Tensor affine(const at::Tensor& x, const Parameters& p) { return at::linear(x, p[0], p[1]); }

std::vector<Subject> linears(const DeviceMesh& mesh) {
  ColumnParallelOptions columns = ColumnParallelOptions::ml(40, 24);
  RowParallelOptions rows(40, 24);
  const ColumnParallelLinear column(columns, mesh);
  rows.allow_uneven = true;
  const RowParallelLinear row(rows, mesh);
  std::vector<Subject> out = {{"columns",
                               [column](const at::Tensor& x) { return ColumnParallelLinear(column)->forward(x); },
                               affine,
                               {column->weight, column->bias}},
                              {"rows",
                               [row](const at::Tensor& x) { return RowParallelLinear(row)->forward(x); },
                               affine,
                               {row->weight, row->bias}}};
  for (const ParallelDim dim : {ParallelDim(), ParallelDim(0), ParallelDim(1)}) {
    const ParallelLinear layer(40, 24, mesh, ParallelDimOptions{.dim = dim, .allow_uneven = true});
    out.push_back({fmt::format("dim {}", dim.value_or(-1)),
                   [layer](const at::Tensor& x) { return ParallelLinear(layer)->forward(x); },
                   affine,
                   {layer->weight, layer->bias}});
  }
  return out;
}

}  // namespace

TESSERA_RANKS_TEST_CASE("linear layers in float32", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  manual_seed(1, mesh.world());
  for (const Subject& subject : linears(mesh)) check_subject(subject, sample({7, 5, 40}, 1, at::kFloat));
}

TESSERA_RANKS_TEST_CASE("embeddings in float32", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  manual_seed(1, mesh.world());
  for (const EmbeddingCut cut : {EmbeddingCut::kVocabulary, EmbeddingCut::kWidth, EmbeddingCut::kNone}) {
    ParallelEmbeddingOptions options(48, 16);
    options.cut = cut;
    options.allow_uneven = true;
    options.padding_idx = 5;
    const ParallelEmbedding layer(options, mesh);
    check_subject({fmt::format("cut {}", static_cast<int>(cut)),
                   [layer](const at::Tensor& ids) { return ParallelEmbedding(layer)->forward(ids); },
                   [](const at::Tensor& ids, const Parameters& p) { return at::embedding(p[0], ids, 5); },
                   {layer->weight}},
                  at::remainder(at::arange(17 * 23, on(at::kLong)) * 7, 48).view({17, 23}));
  }
}

TESSERA_RANKS_TEST_CASE("losses in float32", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const int64_t classes = 11 * mesh.size();
  const at::Tensor logits = sample({13, classes}, 1, at::kFloat) * 30,
                   target = at::remainder(at::arange(13, on(at::kLong)) * 5, classes);
  const auto cut = [&](const at::Tensor& x) { return redistribute(from_local(x, mesh, {Replicate()}), {Shard(1)}); };
  for (const auto reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
    const ParallelCrossEntropyOptions options{.reduction = reduction, .label_smoothing = 0.1};
    check_subject({fmt::format("reduction {}", static_cast<int>(reduction)),
                   [&](const at::Tensor& x) { return parallel_cross_entropy(cut(x), target, options); },
                   [&](const at::Tensor& x, const Parameters&) {
                     return at::cross_entropy_loss(x, target, {}, reduction, -100, 0.1);
                   },
                   {}},
                  logits);
  }
  const double spread = 0.1 * static_cast<double>(classes) / static_cast<double>(classes - 1);
  check_subject({"Megatron's",
                 [&](const at::Tensor& x) { return vocab_parallel_cross_entropy(to_local(cut(x)), target, mesh, 0.1); },
                 [&](const at::Tensor& x, const Parameters&) {
                   return at::cross_entropy_loss(x, target, {}, at::Reduction::None, -100, spread);
                 },
                 {}},
                logits);
}
