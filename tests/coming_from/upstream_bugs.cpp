// Shows for each bug of the other libraries, by its name, that the function here equals one process, in float64.

#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/mappings.h"
#include "tessera/layers/init_type.h"
#include "tessera/layers/parallel_dim.h"
#include "tessera/layers/parallel_embedding.h"
#include "tessera/layers/parallel_linear.h"
#include "tessera/layers/rng_tracker.h"
#include "tessera/layers/sharded_embedding.h"
#include "tessera/layers/sharded_linear.h"
#include "tessera/layers/tensor_chunks.h"
#include "tessera/ops/kernels/sharded_cross_entropy.h"
#include "tessera/tests/coming_from/one_process.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/harness/refused.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

at::Tensor columns_of(const at::Tensor& whole, const DeviceMesh& mesh) {
  return piece_of(whole, mesh, {Shard(whole.dim() - 1)});
}

// Computes Megatron's formula in one process from the probabilities that it uses: 1 - a for the target, a / (K - 1) for
// every other class.
at::Tensor smoothed(const at::Tensor& logits, const at::Tensor& target, double a) {
  const int64_t classes = logits.size(-1);
  const at::Tensor hit = at::one_hot(target, classes).to(logits.scalar_type());
  const at::Tensor wanted = hit * (1 - a) + (1 - hit) * (a / static_cast<double>(classes - 1));
  return -(wanted * logits.log_softmax(-1)).sum(-1);
}

void fill(const at::Tensor& parameter, int64_t seed) {
  const c10::AutoGradMode none(false);
  const at::Tensor whole = sample(parameter.sizes(), seed);
  at::Tensor(parameter).copy_(distribute_tensor(whole, mesh_of(parameter), placements_of(parameter)));
}

}  // namespace

// The original takes the number of classes, and the mean over them, from this rank's part, so losses differ between
// ranks.
TESSERA_RANKS_TEST_CASE("smoothing_over_the_shard", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor target = at::remainder(at::arange(10) * 5 + 1, 24).view({5, 2});
  for (const double smoothing : {0.0, 0.1, 0.9}) {
    const at::Tensor whole = leaf(sample({5, 2, 24}, 1) * 4), part = leaf(columns_of(whole.detach(), mesh));
    const at::Tensor want = smoothed(whole, target, smoothing);
    const at::Tensor loss = vocab_parallel_cross_entropy(part, target, mesh, smoothing);
    CHECK(close(loss.detach(), want.detach()));
    const at::Tensor g = sample({5, 2}, 2);
    want.backward(g);
    loss.backward(g);
    CHECK(close(part.grad(), columns_of(whole.grad(), mesh)));
  }
  // Computed by hand: 4.45834 without smoothing. Two ranks that smooth over their parts get 4.65834 and 4.12501.
  const at::Tensor logits = at::arange(8, at::kDouble).view({1, 8}), third = at::full({1}, 3, at::kLong);
  const CrossEntropyOptions options{.label_smoothing = 0.1,
                                    .smoothing = SmoothingFormula::kMegatron,
                                    .classes = 8};  // three ranks have 3, 3, 2 of them
  const at::Tensor loss = sharded_cross_entropy(columns_of(logits, mesh), third, mesh, options);
  CHECK(fmt::format("{:.5f}", loss.item<double>()) == "4.40120");
}

// The original adds the bias before the sum over the ranks, and again after it.
TESSERA_RANKS_TEST_CASE("bias_counted_n_plus_1_times", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const bool parallel : {false, true}) {
    CAPTURE(parallel);
    RowParallelOptions options(12, 7);
    options.input_is_parallel = parallel;
    options.config = in_double();
    RowParallelLinear layer(options, mesh);
    fill(layer->weight, 1);
    fill(layer->bias, 2);
    const at::Tensor x = leaf(sample({5, 12}, 3)), w = leaf(sample({7, 12}, 1)), b = leaf(sample({7}, 2));
    const at::Tensor mine = leaf(parallel ? columns_of(x.detach(), mesh) : x.detach());
    const at::Tensor want = at::linear(x, w, b), got = layer->forward(mine);
    CHECK(close(got.detach(), want.detach()));
    CHECK(same(layer->master_bias(), b.detach()));
    want.pow(2).sum().backward();
    got.pow(2).sum().backward();
    CHECK(close(full_tensor(layer->bias.grad()), b.grad()));
    CHECK(close(full_tensor(layer->weight.grad()), w.grad()));
    CHECK(close(mine.grad(), parallel ? columns_of(x.grad(), mesh) : x.grad()));
    // For an input of zeros the output is the bias, to the bit.
    const at::Tensor alone = layer->forward(at::zeros_like(mine)).detach();
    CHECK(same(alone, b.detach().expand({5, 7}).contiguous()));
  }
}

// The original passes the id, which counts in the whole table, to every rank's part: the gradient of an unrelated row
// is dropped, or there is no such row.
TESSERA_RANKS_TEST_CASE("padding_idx_on_the_wrong_rank", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor ids = at::remainder(at::arange(36) * 5, 12).view({4, 9});
  const at::Tensor g = sample({4, 9, 12}, 2);
  for (int64_t padding = 0; padding < 12; ++padding) {
    CAPTURE(padding);
    const at::Tensor table = leaf(sample({12, 12}, 1));
    const at::Tensor want = at::embedding(table, ids, padding);
    want.backward(g);
    CHECK(same(table.grad()[padding], at::zeros({12}, at::kDouble)));
    for (const ParallelDim dim : std::vector<ParallelDim>{0, 1}) {
      const int64_t along = *dim;
      const at::Tensor piece = leaf(piece_of(table.detach(), mesh, {Shard(along)}));
      ShardedEmbeddingOptions options{.num_embeddings = 12};
      options.padding_idx = padding;
      const at::Tensor got = parallel_embedding(ids, piece, options, dim, mesh);
      CHECK(close(got.detach(), want.detach()));
      got.backward(g);
      CHECK(close(piece.grad(), piece_of(table.grad(), mesh, {Shard(along)})));

      ParallelEmbeddingOptions layer_options(12, 12);
      layer_options.padding_idx = padding - 12;  // the same id, counted from the end
      layer_options.given_weight = table.detach();
      layer_options.config = in_double();
      ParallelEmbedding layer = parallel_embedding_layer(layer_options, dim, mesh);
      layer->forward(ids).backward(g);
      CHECK(close(full_tensor(layer->weight.grad()), table.grad()));
    }
  }
}

// The original accepts both arguments and ignores them.
TESSERA_RANKS_TEST_CASE("ignored_weight_and_ignore_index", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  at::Tensor target = at::remainder(at::arange(13) * 5, 11);
  const at::Tensor weight = at::rsub(sample({11}, 2), 1.5);
  for (const int64_t ignored : {-100L, 4L}) {
    target[3] = ignored;
    target[7] = ignored;
    for (const auto reduction : {at::Reduction::Mean, at::Reduction::Sum, at::Reduction::None}) {
      for (const at::Tensor& w : {weight, at::Tensor()}) {
        CAPTURE(fmt::format("ignore {}, reduction {}, weight {}", ignored, static_cast<int>(reduction), w.defined()));
        const at::Tensor whole = leaf(sample({13, 11}) * 1000);
        const at::Tensor cut = leaf(spread(whole.detach(), mesh, {Shard(1)}));
        const auto given = w.defined() ? std::make_optional(w) : std::nullopt;
        const at::Tensor want = at::cross_entropy_loss(whole, target, given, reduction, ignored);
        ParallelCrossEntropyLoss loss(
            ParallelCrossEntropyOptions{.weight = w, .ignore_index = ignored, .reduction = reduction});
        const at::Tensor got = loss->forward(cut, target);
        CHECK(close(got.detach(), want.detach()));
        want.sum().backward();
        got.sum().backward();
        const at::Tensor gradient = full_tensor(cut.grad());
        CHECK(close(gradient, whole.grad()));
        CHECK(same(gradient[3], at::zeros({11}, at::kDouble)));
      }
    }
  }
}

// The original computes the gradient in the memory of what it saved, so a second backward sees other values.
TESSERA_RANKS_TEST_CASE("second_backward", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor target = at::remainder(at::arange(6) * 5, 12), g = sample({6}, 2);
  for (const double smoothing : {0.0, 0.2}) {
    const at::Tensor whole = leaf(sample({6, 12}, 1) * 3), part = leaf(columns_of(whole.detach(), mesh));
    const at::Tensor want = smoothed(whole, target, smoothing);
    const at::Tensor loss = vocab_parallel_cross_entropy(part, target, mesh, smoothing);
    for (int i = 0; i < 3; ++i) {
      want.backward(g * (i + 1), /*retain_graph=*/true);
      loss.backward(g * (i + 1), /*retain_graph=*/true);
      CHECK(close(part.grad(), columns_of(whole.grad(), mesh)));
    }
  }
  const at::Tensor x = leaf(sample({4, 6}, 3)), w = leaf(sample({12, 6}, 4)), b = leaf(sample({12}, 5));
  const at::Tensor my_x = leaf(x.detach()), my_w = leaf(piece_of(w.detach(), mesh, {Shard(0)})),
                   my_b = leaf(piece_of(b.detach(), mesh, {Shard(0)}));
  const at::Tensor want = at::linear(x, w, b).pow(3).sum();
  const at::Tensor term = sharded_linear(my_x, my_w, my_b, mesh, {.reduce_input_gradient = true}).pow(3).sum();
  for (int i = 0; i < 2; ++i) {
    want.backward({}, /*retain_graph=*/true);
    term.backward({}, /*retain_graph=*/true);
    CHECK(close(my_x.grad(), x.grad()));
    CHECK(close(my_w.grad(), piece_of(w.grad(), mesh, {Shard(0)})));
    CHECK(close(my_b.grad(), piece_of(b.grad(), mesh, {Shard(0)})));
  }
}

// The original divides rounding down: elements after the last part are in none.
TESSERA_RANKS_TEST_CASE("dropped_remainders", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const int64_t n = mesh.size();
  const at::Tensor whole = sample({2 * n + 1, 3});
  const at::Tensor x = leaf(whole);
  const at::Tensor mine = scatter_to_region(x, mesh, 0, /*allow_uneven=*/true);
  const at::Tensor back = gather_from_region(mine, mesh, {.tensor_dim = 0, .size = 2 * n + 1});
  CHECK(same(back.detach(), whole));
  back.backward(sample(whole.sizes(), 2));
  CHECK(same(x.grad(), sample(whole.sizes(), 2)));
  // Backward gathers the uneven pieces of a sum's gradient, and adds and cuts the gradients of what was gathered.
  const int64_t me = mesh.local_rank(0);
  const at::Tensor terms = sample({n, 2 * n + 1, 3}, 3), grads = sample({n, 2 * n + 1, 3}, 4);
  const at::Tensor term = leaf(terms[me]);
  const at::Tensor summed = reduce_scatter_to_sequence_region(term, mesh, /*allow_uneven=*/true);
  CHECK(close(summed.detach(), piece_of(terms.sum(0), mesh, {Shard(0)})));
  summed.backward(piece_of(whole, mesh, {Shard(0)}));
  CHECK(close(term.grad(), whole));
  const at::Tensor piece = leaf(piece_of(whole, mesh, {Shard(0)}));
  const at::Tensor gathered = gather_from_sequence_region(piece, mesh, /*tensor_parallel_output_grad=*/true, 2 * n + 1);
  CHECK(same(gathered.detach(), whole));
  gathered.backward(grads[me]);
  CHECK(close(piece.grad(), piece_of(grads.sum(0), mesh, {Shard(0)})));
  const at::Tensor flat = sample({6 * n});
  CHECK(same(gather_split_1d_tensor(split_into_1d_equal_chunks(flat, mesh), mesh), flat));
  if (n == 1) return;
  const auto refused = [](const auto& call) { check_refused(call, "not divisible by"); };
  refused([&] { scatter_to_region(whole, mesh, 0); });
  refused([&] { scatter_to_sequence_region(whole, mesh); });
  refused([&] { reduce_scatter_to_sequence_region(whole, mesh); });
  refused([&] { split_into_1d_equal_chunks(sample({6 * n + 1}), mesh); });
  refused([&] { split_along_last_dim(sample({2, 2 * n + 1}), n); });
  refused([&] { ColumnParallelLinear(ColumnParallelOptions(4, 2 * n + 1), mesh); });
}

// The original does not reduce the input's gradient where the weight is frozen, and gives a bias of such a layer none.
TESSERA_RANKS_TEST_CASE("gradients_lost_by_frozen_layers", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const bool sequence : {false, true}) {
    CAPTURE(sequence);
    // A layer that trains, whole on every rank, comes before a frozen one.
    const at::Tensor x = sample({12, 5}, 1), first = leaf(sample({6, 5}, 2)), w = sample({24, 6}, 3),
                     b = leaf(sample({24}, 4));
    const at::Tensor my_first = leaf(first.detach()), my_w = piece_of(w, mesh, {Shard(0)}).requires_grad_();
    const at::Tensor my_b = leaf(piece_of(b.detach(), mesh, {Shard(0)}));
    const at::Tensor rows = sequence ? piece_of(x, mesh, {Shard(0)}) : x;
    const at::Tensor want = at::linear(at::linear(x, first).tanh(), w, b);
    const at::Tensor got =
        sharded_linear(at::linear(rows, my_first).tanh(), my_w, my_b, mesh,
                       {.reduce_input_gradient = true, .sequence_parallel = sequence, .frozen_weight = true});
    CHECK(close(got.detach(), columns_of(want.detach(), mesh)));
    const at::Tensor g = sample({12, 24}, 5);
    want.backward(g);
    got.backward(columns_of(g, mesh));
    const at::Tensor gradient = sequence ? reduce_from_region(my_first.grad(), mesh) : my_first.grad();
    CHECK(close(gradient, first.grad()));
    CHECK(close(my_b.grad(), piece_of(b.grad(), mesh, {Shard(0)})));
    CHECK_FALSE(my_w.grad().defined());
  }
  ColumnParallelOptions up(5, 12);
  RowParallelOptions down(12, 4);
  down.input_is_parallel = true;
  up.config = down.config = in_double();
  ColumnParallelLinear columns(up, mesh);
  RowParallelLinear rows(down, mesh);
  for (const at::Tensor& each : {columns->weight, columns->bias, rows->weight}) at::Tensor(each).requires_grad_(false);
  const at::Tensor x = leaf(sample({3, 5})), mine = leaf(x.detach());
  at::linear(at::linear(x, columns->master_weight()), rows->master_weight()).pow(2).sum().backward();
  rows->forward(columns->forward(mine)).pow(2).sum().backward();
  CHECK(close(mine.grad(), x.grad()));
  CHECK(rows->bias.grad().defined());
}

// The original starts an inner fork of a stream where the outer one started, and loses what the inner one drew.
TESSERA_RANKS_TEST_CASE("nested_forks", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const auto me = static_cast<uint64_t>(mesh.local_rank(0));
  const auto draw = [] { return at::rand({7}, at::kDouble); };
  const auto stream_of = [&](uint64_t seed) {
    at::manual_seed(seed);
    return std::vector<at::Tensor>{draw(), draw(), draw(), draw(), draw()};
  };
  const std::vector<at::Tensor> outside = stream_of(77), model = stream_of(77 + 2718 + me),
                                experts = stream_of(77 + 1024 + 101 * me);
  model_parallel_manual_seed(77, mesh, mesh);
  RngStatesTracker& tracker = rng_tracker();
  CHECK(same(draw(), outside[0]));
  {
    const auto outer = tracker.fork();
    CHECK(same(draw(), model[0]));
    {
      const auto inner = tracker.fork();
      CHECK(same(draw(), model[1]));
      const auto other = tracker.fork(expert_parallel_rng_tracker_name());
      CHECK(same(draw(), experts[0]));
      const auto innermost = tracker.fork();
      CHECK(same(draw(), model[2]));
    }
    CHECK(same(draw(), model[3]));
  }
  CHECK(same(draw(), outside[1]));
  {
    const auto fork = tracker.fork();
    CHECK(same(draw(), model[4]));
  }
  const auto fork = tracker.fork(expert_parallel_rng_tracker_name());
  CHECK(same(draw(), experts[1]));
}
