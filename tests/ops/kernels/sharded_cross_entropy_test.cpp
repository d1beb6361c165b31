#include "tessera/ops/kernels/sharded_cross_entropy.h"

#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/forward_level.h"
#include "tessera/tests/dtensor/relative.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Megatron's formula gives every class but the target a / (K - 1), which is PyTorch's formula with a * K / (K - 1).
double as_pytorch(const CrossEntropyOptions& options, int64_t classes) {
  const double a = options.label_smoothing;
  return options.smoothing == SmoothingFormula::kMegatron
             ? a * static_cast<double>(classes) / static_cast<double>(classes - 1)
             : a;
}

// Returns LibTorch's loss of whole logits [n, K].
at::Tensor dense(const at::Tensor& logits, const at::Tensor& target, const CrossEntropyOptions& options) {
  const auto weight =
      options.weight.defined() ? std::make_optional(options.weight.to(logits.scalar_type())) : std::nullopt;
  return at::cross_entropy_loss(logits, target, weight, options.reduction, options.ignore_index,
                                as_pytorch(options, logits.size(1)));
}

// Returns this rank's columns.
at::Tensor mine(const at::Tensor& whole, const DeviceMesh& mesh) {
  return piece_of(whole, mesh, {Shard(whole.dim() - 1)});
}

struct Numbers {
  int64_t classes;
  at::Tensor logits;  // [n, classes]
  at::Tensor target;
};

Numbers numbers(int64_t classes, double scale, at::ScalarType dtype = at::kDouble, int64_t n = 6) {
  return {classes, sample({n, classes}, 1, dtype) * scale, at::remainder(at::arange(n) * 5 + 1, classes)};
}

void check_alike(const Numbers& in, CrossEntropyOptions options, const DeviceMesh& mesh, double tolerance) {
  options.classes = in.classes;
  const at::Tensor whole = leaf(in.logits), part = leaf(mine(in.logits, mesh));
  const at::Tensor want = dense(whole, in.target, options);
  CommCounter counter(mesh);
  const at::Tensor loss = sharded_cross_entropy(part, in.target, mesh, options);
  CAPTURE(counter.to_string());
  CHECK(counter.count("all_reduce") == (mesh.size() > 1 ? 2 : 0));
  CHECK(counter.total() == counter.count("all_reduce"));
  CHECK(close_to_scale(loss.detach(), want.detach(), tolerance));
  const at::Tensor g =
      want.dim() == 0 ? at::full({}, 1.7, want.scalar_type()) : sample(want.sizes(), 3, want.scalar_type());
  want.backward(g);
  counter.reset();
  loss.backward(g);
  CHECK(counter.total() == 0);
  // `close` allows an error relative to at least 1, so both are divided by the largest magnitude of the whole gradient;
  // the classes of one rank may all be unlikely.
  const double scale = whole.grad().abs().max().item<double>();
  REQUIRE(scale > 0);
  CHECK(close(part.grad() / scale, mine(whole.grad(), mesh) / scale, tolerance));
}

std::vector<CrossEntropyOptions> all_options(int64_t classes) {
  std::vector<CrossEntropyOptions> out;
  for (const auto reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
    for (const double smoothing : {0.0, 0.1, 1.0}) {
      for (const auto formula : {SmoothingFormula::kPyTorch, SmoothingFormula::kMegatron}) {
        if (smoothing == 1.0 && formula == SmoothingFormula::kMegatron) continue;  // PyTorch's smoothing is at most 1
        for (const int64_t ignored : {-100L, 1L}) {
          for (const bool weighted : {false, true}) {
            out.push_back({.weight = weighted ? at::rsub(sample({classes}, 2), 1.5) : at::Tensor(),
                           .ignore_index = ignored,
                           .reduction = reduction,
                           .label_smoothing = smoothing,
                           .smoothing = formula});
          }
        }
      }
    }
  }
  return out;
}

}  // namespace

TESSERA_RANKS_TEST_CASE("ignored_weight_and_ignore_index: the loss and its gradient equal LibTorch's of the whole",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const int64_t classes : {12, 10, 3}) {
    for (const double scale : {1.0, 1000.0}) {
      for (const CrossEntropyOptions& options : all_options(classes)) {
        CAPTURE(fmt::format("{} classes times {}: reduction {}, smoothing {} {}, ignore {}, weighted {}", classes,
                            scale, static_cast<int>(options.reduction), options.label_smoothing,
                            static_cast<int>(options.smoothing), options.ignore_index, options.weight.defined()));
        check_alike(numbers(classes, scale), options, mesh, 1e-12);
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("rows that are worked on in several parts, the last one shorter", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const int64_t classes = 1003, rows = 301;  // a part has 128 KiB: 16 rows of all classes on one rank, 65 on four
  for (const CrossEntropyOptions& options : all_options(classes)) {
    CAPTURE(fmt::format("reduction {}, smoothing {}, ignore {}, weighted {}", static_cast<int>(options.reduction),
                        options.label_smoothing, options.ignore_index, options.weight.defined()));
    check_alike(numbers(classes, 5, at::kDouble, rows), options, mesh, 1e-12);
  }
}

TESSERA_RANKS_TEST_CASE("float32, and sums of float32 for bfloat16", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  for (const CrossEntropyOptions& options : all_options(11))
    check_alike(numbers(11, 4, at::kFloat), options, mesh, 1e-5);
  const Numbers in = numbers(12, 4, at::kBFloat16);
  const at::Tensor part = leaf(mine(in.logits, mesh)), whole = leaf(in.logits.to(at::kFloat));
  const at::Tensor loss = sharded_cross_entropy(part, in.target, mesh), want = dense(whole, in.target, {});
  CHECK(close(loss.detach(), want.detach(), 1e-5));
  loss.backward();
  want.backward();
  CHECK(same(part.grad(), mine(whole.grad().to(at::kBFloat16), mesh)));
}

TESSERA_RANKS_TEST_CASE("smoothing_over_the_shard: of all classes, 4.40120 on every rank", {1, 2, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor logits = mine(at::arange(8, at::kDouble).view({1, 8}), mesh), target = at::full({1}, 3, at::kLong);
  const auto loss = [&](const CrossEntropyOptions& options) {
    return fmt::format("{:.5f}", sharded_cross_entropy(logits, target, mesh, options).item<double>());
  };
  CHECK(loss({}) == "4.45834");
  CHECK(loss({.label_smoothing = 0.1, .smoothing = SmoothingFormula::kMegatron}) == "4.40120");
  CHECK(loss({.label_smoothing = 0.1}) == "4.40834");
}

TESSERA_RANKS_TEST_CASE("Megatron's own numbers: 0 to 7 again and again, 10.2309 and three more", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor logits = mine(at::arange(8, at::kFloat).repeat({16, 16}), mesh);  // 128 classes, uneven over 3 ranks
  const at::Tensor losses =
      sharded_cross_entropy(logits, at::arange(0, 32, 2), mesh, {.reduction = at::Reduction::None, .classes = 128});
  const std::vector<std::string> want = {"10.2309", "8.2309", "6.2309", "4.2309"};
  for (int64_t i = 0; i < 16; ++i) {
    CHECK(fmt::format("{:.4f}", losses[i].item<float>()) == want[static_cast<std::size_t>(i % 4)]);
  }
}

TESSERA_RANKS_TEST_CASE("losses of sequences keep the target's shape", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor logits = sample({13, 17, 22}) * 1000,
                   target = at::remainder(at::arange(13 * 17) * 3, 22).view({13, 17});
  const at::Tensor whole = leaf(logits), part = leaf(mine(logits, mesh));
  const at::Tensor loss = sharded_cross_entropy(part, target, mesh, {.reduction = at::Reduction::None});
  const at::Tensor want =
      dense(whole.view({-1, 22}), target.view({-1}), {.reduction = at::Reduction::None}).view({13, 17});
  CHECK(close(loss.detach(), want.detach()));
  loss.sum().backward();
  want.sum().backward();
  CHECK(close(part.grad(), mine(whole.grad(), mesh)));
}

TESSERA_RANKS_TEST_CASE("second_backward: the graph kept gives the same gradient again, and takes one of the gradient",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  for (const CrossEntropyOptions& given : all_options(9)) {
    CrossEntropyOptions options = given;
    options.classes = 9;
    const Numbers in = numbers(9, 2);
    const at::Tensor whole = leaf(in.logits), part = leaf(mine(in.logits, mesh));
    const at::Tensor loss = sharded_cross_entropy(part, in.target, mesh, options).sum();
    loss.backward({}, /*retain_graph=*/true);
    const at::Tensor once = part.grad().clone();
    loss.backward({}, /*retain_graph=*/true);
    CHECK(close(part.grad(), once * 2));
    part.mutable_grad().reset();
    // The penalty is this rank's term of the whole penalty.
    const auto penalty = [](const at::Tensor& l, const at::Tensor& x) {
      return torch::autograd::grad({l}, {x}, {}, true, /*create_graph=*/true)[0].pow(3).sum();
    };
    penalty(loss, part).backward();
    penalty(dense(whole, in.target, options).sum(), whole).backward();
    CHECK(close(part.grad(), mine(whole.grad(), mesh), 1e-11));
  }
}

TESSERA_RANKS_TEST_CASE("all targets ignored, no rows, and logits that are not finite", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor target = at::full({2}, -100, at::kLong);
  const at::Tensor part = leaf(at::ones({2, 3}));
  const at::Tensor sum = sharded_cross_entropy(part, target, mesh, {.reduction = at::Reduction::Sum});
  CHECK(sum.item<float>() == 0);
  sum.backward();
  CHECK(same(part.grad(), at::zeros({2, 3})));
  CHECK(std::isnan(sharded_cross_entropy(part.detach(), target, mesh).item<float>()));  // like an empty mean
  CHECK(sharded_cross_entropy(at::ones({0, 3}), at::empty({0}, at::kLong), mesh, {.reduction = at::Reduction::None})
            .numel() == 0);
  const at::Tensor inf = at::full({1, 2}, -std::numeric_limits<float>::infinity());
  const at::Tensor one = mesh.local_rank(0) == 0 ? at::zeros({1, 2}) : inf;
  CHECK(sharded_cross_entropy(one, at::zeros({1}, at::kLong), mesh).item<float>() == doctest::Approx(std::log(2.0)));
}

TESSERA_RANKS_TEST_CASE("a gradient of the gradient of a mean of no targets is 0", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor part = leaf(sample({2, 3})), target = at::full({2}, -100, at::kLong);
  const at::Tensor loss = sharded_cross_entropy(part, target, mesh);
  torch::autograd::grad({loss}, {part}, {}, true, /*create_graph=*/true)[0].pow(2).sum().backward();
  CHECK(same(part.grad(), at::zeros({2, 3}, at::kDouble)));
}

TESSERA_RANKS_TEST_CASE("weights of classes that were written since forward are an error, as in LibTorch", {1, 2}) {
  const DeviceMesh mesh = line();
  const at::Tensor weight = at::ones({3 * mesh.size()}, at::kDouble), part = leaf(sample({2, 3}));
  const at::Tensor loss =
      sharded_cross_entropy(part, at::zeros({2}, at::kLong), mesh, {.weight = weight, .reduction = at::Reduction::Sum});
  weight.mul_(2);
  CHECK_THROWS_WITH(loss.backward(), doctest::Contains("modified by an inplace operation"));
}

TESSERA_RANKS_TEST_CASE("an ignore_index that a target's dtype cannot hold ignores nothing", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor logits = sample({4, 200}), target = at::tensor({0L, 156L, 199L, 7L});  // -100 is 156 in a byte
  const at::Tensor loss = sharded_cross_entropy(mine(logits, mesh), target.to(at::kByte), mesh, {.classes = 200});
  CHECK(close(loss, at::cross_entropy_loss(logits, target)));
}

TESSERA_RANKS_TEST_CASE("one_rank_errors: a target that is no class is an error on every rank, as is what does not fit",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor logits = at::ones({2, 4});
  const auto refused = [&](const at::Tensor& x, const at::Tensor& target, const std::string& text,
                           const CrossEntropyOptions& options = {}) {
    CHECK_THROWS_WITH_AS(sharded_cross_entropy(x, target, mesh, options), doctest::Contains(text.c_str()),
                         std::invalid_argument);
  };
  const at::Tensor zeros = at::zeros({2}, at::kLong);
  CommCounter counter(mesh);
  refused(logits, zeros + 4 * mesh.size(), "is out of bounds: there are");
  refused(logits, zeros - 1, "target -1 is out of bounds");
  refused(logits, at::zeros({2}), "a target has class numbers");
  refused(logits, zeros, "label_smoothing -0.1 is outside [0, 1]", {.label_smoothing = -0.1});
  refused(logits, zeros, "label_smoothing nan", {.label_smoothing = std::nan("")});
  refused(logits, zeros, "it has one number per class", {.weight = at::ones({3})});
  refused(logits, zeros, "give it weight.detach()", {.weight = at::ones({4 * mesh.size()}).requires_grad_()});
  refused(from_local(logits, mesh, {Shard(1)}), zeros, "cross_entropy takes it as it is");
  {
    const ForwardLevel level;
    refused(dual(logits, logits), zeros, "which this kernel has no formula for");
  }
  refused(logits, at::zeros({3}, at::kLong), "they are [*, classes] and [*]");  // it fails the job
  CHECK(counter.total() == 0);
}
