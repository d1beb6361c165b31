// Compares torch::nn::functional::cross_entropy of DTensors whose classes are cut with one process.

#include <exception>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/layers/parallel_dim.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/dtensor/whole_value.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/harness/text.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

struct Options {
  at::Tensor weight;
  int64_t reduction = at::Reduction::Mean;
  int64_t ignore_index = -100;
  double smoothing = 0;

  at::Tensor operator()(const at::Tensor& logits, const at::Tensor& target) const {
    const auto given = weight.defined() ? std::make_optional(weight) : std::nullopt;
    return at::cross_entropy_loss(logits, target, given, reduction, ignore_index, smoothing);
  }
};

// Holds the text with which a loss was refused, or the gradients by its logits and by the weights of its classes.
struct Outcome {
  std::optional<std::string> refusal;
  at::Tensor of_logits, of_weights;
};

std::vector<Options> all_options(int64_t classes) {
  std::vector<Options> out;
  for (const int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
    for (const double smoothing : {0.0, 0.1}) {
      for (const int64_t ignored : {-100, 1}) {
        out.push_back({.reduction = reduction, .ignore_index = ignored, .smoothing = smoothing});
        out.push_back({.weight = at::rsub(sample({classes}, 2), 1.5),
                       .reduction = reduction,
                       .ignore_index = ignored,
                       .smoothing = smoothing});
      }
    }
  }
  return out;
}

at::Tensor target_of(const at::Tensor& logits) {
  std::vector<int64_t> sizes = logits.sizes().vec();
  const int64_t class_dim = logits.dim() == 1 ? 0 : 1, classes = logits.size(class_dim);
  sizes.erase(sizes.begin() + class_dim);
  return at::remainder(at::arange(c10::multiply_integers(sizes)) * 5 + 1, classes).view(sizes);
}

bool cuts_classes(const Placements& placements, const at::Tensor& logits) {
  for (const Placement& each : placements) {
    if (each == Shard(logits.dim() == 1 ? 0 : 1)) return true;
  }
  return false;
}

void check_alike(const at::Tensor& value, const DeviceMesh& mesh, const Placements& placements,
                 const Options& options) {
  const at::Tensor target = target_of(value), whole = leaf(value), cut = leaf(spread(value, mesh, placements));
  const at::Tensor want = options(whole, target), got = options(cut, target);
  CHECK(close(full_tensor(got.detach()), want.detach()));
  const at::Tensor g = want.dim() == 0 ? at::full({}, 1.7, at::kDouble) : sample(want.sizes(), 3);
  want.backward(g);
  got.backward(spread(g, mesh, Placements(placements.size(), Replicate())));
  CHECK(placements_of(cut.grad()) == placements);
  CHECK(close(full_tensor(cut.grad()), whole.grad()));
}

}  // namespace

TESSERA_RANKS_TEST_CASE("cross entropy of cut classes equals one process's: every layout, option and shape",
                        {1, 2, 3, 4}) {
  const ImplicitReplication plain_targets;
  const std::vector<at::Tensor> values = {sample({6, 10}, 1), sample({4, 5, 3}, 2), sample({7}, 3),
                                          sample({2, 3}, 4) * 1000};
  for (const DeviceMesh& mesh : meshes()) {
    for (const at::Tensor& value : values) {
      Placements kinds = {Replicate(), Shard(0)};
      if (value.dim() > 1) kinds.push_back(Shard(1));
      for (const Placements& placements : all_layouts(mesh.ndim(), kinds)) {
        if (!cuts_classes(placements, value)) continue;
        for (const Options& options : all_options(value.size(value.dim() == 1 ? 0 : 1))) {
          CAPTURE(fmt::format("{} {} dims, reduction {}, smoothing {}, ignore {}, weighted {}", to_string(placements),
                              value.dim(), options.reduction, options.smoothing, options.ignore_index,
                              options.weight.defined()));
          check_alike(value, mesh, placements, options);
        }
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE(
    "cut classes take two all-reduces, a batch that is cut besides those of its sums, backward none", {2, 3, 4}) {
  const ImplicitReplication plain_targets;
  const at::Tensor value = sample({4, 12}, 1), target = target_of(value);
  for (const int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
    const at::Tensor cut = leaf(spread(value, line(), {Shard(1)}));
    CommCounter counter(line());
    const at::Tensor loss = Options{.reduction = reduction}(cut, target);
    CHECK(counter.count("all_reduce") == 2);
    CHECK(counter.total() == 2);
    counter.reset();
    loss.sum().backward();
    CHECK(counter.total() == 0);
  }
  if (world()->size() != 4) return;
  const DeviceMesh plane = mesh_over({2, 2});
  CommCounter counter(plane);
  const at::Tensor cut = leaf(spread(value, plane, {Shard(0), Shard(1)}));
  full_tensor(Options{}(cut, target));
  CHECK(counter.count("all_reduce") == 4);  // and two for the sums of losses and of their weights
  CHECK(counter.total() == 4);
}

TESSERA_RANKS_TEST_CASE("targets of narrow dtypes, DTensors as targets, float32 and half, and InferenceMode", {2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor value = sample({4, 6}, 1), target = target_of(value);
  const Options options{.reduction = at::Reduction::None};
  const at::Tensor cut = spread(value, mesh, {Shard(1)}), want = options(value, target);
  for (const Placement& lies : {Replicate(), Shard(0)}) {
    CHECK(close(full_tensor(options(cut, spread(target, mesh, {lies}))), want));
  }
  const ImplicitReplication plain_targets;
  CHECK(close(full_tensor(options(cut, target.to(at::kByte))), want));
  CHECK(close(full_tensor(Options{}(cut, target.to(at::kByte))), Options{}(value, target)));
  const at::Tensor half = options(spread(value.to(at::kHalf), mesh, {Shard(1)}), target);
  CHECK((half.scalar_type() == at::kHalf));
  CHECK(close(full_tensor(half).to(at::kDouble), want, 1e-3));
  const c10::InferenceMode inference;
  CHECK(close(full_tensor(options(spread(value, mesh, {Shard(1)}), target)), want));
}

TESSERA_RANKS_TEST_CASE("weights of classes that ask for a gradient have one, or are refused as by LibTorch", {1, 2}) {
  const DeviceMesh mesh = init_device_mesh(device_name(), {world_size()}, {"tp"}, world());
  const at::Tensor logits = sample({5, 6}), target = target_of(logits);
  const at::Tensor weights = sample({6}, 2).abs();
  for (const double smoothing : {0.0, 0.1}) {
    for (const bool asks : {false, true}) {
      CAPTURE(smoothing);
      CAPTURE(asks);
      const auto outcome = [&](const at::Tensor& x, const at::Tensor& labels, at::Tensor weight) {
        weight.requires_grad_(asks);
        Outcome out;
        try {
          at::cross_entropy_loss(x, labels, weight, at::Reduction::Sum, -100, smoothing).backward();
        } catch (const std::exception& error) {
          out.refusal = error.what();
          return out;
        }
        REQUIRE(x.grad().defined());
        REQUIRE(weight.grad().defined() == asks);
        out.of_logits = whole_value(x.grad());
        if (asks) out.of_weights = whole_value(weight.grad());
        return out;
      };
      const Outcome want = outcome(leaf(logits), target, weights.clone());
      const Outcome got = outcome(leaf(logits, mesh, {Shard(1)}), spread(target, mesh, {Replicate()}),
                                  spread(weights, mesh, {Replicate()}));
      CAPTURE(want.refusal.value_or("no refusal"));
      CAPTURE(got.refusal.value_or("no refusal"));
      REQUIRE(got.refusal.has_value() == want.refusal.has_value());
      if (want.refusal) {
        CHECK(asks);
        const std::string text = "is not differentiable with respect to argument 'weight'";
        CHECK(contains(*want.refusal, text));
        CHECK(contains(*got.refusal, text));
        continue;
      }
      CHECK(close(got.of_logits, want.of_logits));
      if (asks) CHECK(close(got.of_weights, want.of_weights));
    }
  }
}

TESSERA_RANKS_TEST_CASE("Strict refuses the operator, and allows what is named after its communication", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor value = sample({4, 6}, 1), target = target_of(value), cut = spread(value, mesh, {Shard(1)});
  const ImplicitReplication plain_targets;
  const Strict strict;
  CHECK_THROWS_WITH(Options{}(cut, target), doctest::Contains("parallel_cross_entropy is explicit"));
  CHECK(close(parallel_cross_entropy(cut, target), Options{}(value, target)));
}

TESSERA_RANKS_TEST_CASE("under autocast half logits have losses in float32, as by the operators", {2}) {
  const DeviceMesh mesh = line();
  const ImplicitReplication plain_targets;
  const at::Tensor value = sample({4, 6}, 1, at::kBFloat16), target = target_of(value);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const at::Tensor got = Options{}(spread(value, mesh, {Shard(1)}), target), want = Options{}(value, target);
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  CHECK((got.scalar_type() == want.scalar_type()));
  CHECK(close(full_tensor(got), want, 1e-5));
}

TESSERA_RANKS_TEST_CASE("a plain target is refused where plain tensors do not count as replicated", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor value = sample({4, 6}, 1);
  CHECK_THROWS_WITH(Options{}(spread(value, mesh, {Shard(1)}), target_of(value)), doctest::Contains("plain tensor"));
}
