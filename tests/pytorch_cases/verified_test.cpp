// Tests where PyTorch 2.11's DTensor was seen to be wrong or to hang, by the numbers of the list of these cases, and
// what was added because of them. V1, V6 and V8 are in tests/dtensor/unlike_pytorch_test.cpp, V4 also in
// views_test.cpp.

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/TensorIndexing.h>
#include <doctest/doctest.h>
#include <torch/nn/init.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/random.h"
#include "tessera/mesh/in_process.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/placement/short_names.h"
#include "tessera/tests/pytorch_cases/beside_plain.h"

namespace tessera::testing {
namespace {

constexpr int64_t kReductions[] = {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum};

}  // namespace

TEST_CASE("V2: losses of items, six rows in shards: the mean of them all, for any number of ranks") {
  on_lines([](const DeviceMesh& mesh) {
    for (const Placement& placement : {S0, S1, RaggedShard(0, [&] {
                                         std::vector<int64_t> sizes(static_cast<std::size_t>(mesh.size()), 0);
                                         sizes.back() = 6;
                                         return sizes;
                                       }())}) {
      for (const int64_t reduction : kReductions) {
        CAPTURE(to_string(placement));
        CAPTURE(reduction);
        const std::vector<Operand> pair = {{sample({6, 5}), {placement}}, {sample({6, 5}, 1), {placement}}};
        const auto check = [&](const char* name, const Operator& loss) {
          CAPTURE(name);
          CHECK(beside_plain(mesh, pair, loss).forward == "-");
        };
        check("mse", [&](const Tensors& x) { return at::mse_loss(x[0], x[1], reduction); });
        check("l1", [&](const Tensors& x) { return at::l1_loss(x[0], x[1], reduction); });
        check("smooth l1", [&](const Tensors& x) { return at::smooth_l1_loss(x[0], x[1], reduction); });
        check("huber", [&](const Tensors& x) { return at::huber_loss(x[0], x[1], reduction); });
        check("kl", [&](const Tensors& x) { return at::kl_div(x[0], x[1], reduction, true); });
        check("bce", [&](const Tensors& x) {
          return at::binary_cross_entropy_with_logits(x[0], x[1].sigmoid(), {}, {}, reduction);
        });
      }
    }
  });
}

namespace {

// Ten rows of four classes; rows 2 and 9 are ignored, so that shards have different numbers of targets.
struct Classes {
  at::Tensor logits = sample({10, 4});
  at::Tensor target = [] {
    at::Tensor t = whole_numbers({10}, at::kLong).clamp_max(3);
    t[2] = -100;
    t[9] = -100;
    return t;
  }();
  at::Tensor weight = at::tensor({0.1, 2.0, 1.0, 0.7}, at::kDouble);
};

void check_cross_entropy(const DeviceMesh& mesh, const Placements& of_logits, const Placements& of_target) {
  const Classes c;
  const Placements whole(of_logits.size(), R);
  CAPTURE(to_string(of_logits));
  for (const int64_t reduction : kReductions) {
    for (const double smoothing : {0.0, 0.2}) {
      CAPTURE(reduction);
      CAPTURE(smoothing);
      beside_plain(mesh, {{c.logits, of_logits}, {c.target, of_target}}, [&](const Tensors& x) {
        return at::cross_entropy_loss(x[0], x[1], {}, reduction, -100, smoothing);
      });
      const at::Tensor weight = spread(c.weight, mesh, whole);
      beside_plain(mesh, {{c.logits, of_logits}, {c.target, of_target}}, [&](const Tensors& x) {
        const at::Tensor& of_classes = is_dtensor(x[0]) ? weight : c.weight;
        return at::cross_entropy_loss(x[0], x[1], of_classes, reduction, -100, smoothing);
      });
    }
    // Ignores another class number.
    const at::Tensor target = c.target.clamp_min(0);
    beside_plain(mesh, {{c.logits, of_logits}, {target, of_target}},
                 [&](const Tensors& x) { return at::cross_entropy_loss(x[0], x[1], {}, reduction, 1); });
  }
}

}  // namespace

TEST_CASE("V3: cross_entropy of a batch in shards, with ignore_index and with class weights") {
  on_lines([](const DeviceMesh& mesh) {
    check_cross_entropy(mesh, {S0}, {S0});
    check_cross_entropy(mesh, {S0}, {R});
    check_cross_entropy(mesh, {S1}, {R});
    check_cross_entropy(mesh, {P}, {S0});
  });
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    check_cross_entropy(mesh, {S0, S0}, {S0, S0});
    check_cross_entropy(mesh, {S0, S1}, {S0, R});
  });
}

TEST_CASE("V3: cross_entropy of pixels, batch and places in shards") {
  on_lines([](const DeviceMesh& mesh) {
    const at::Tensor logits = sample({3, 4, 5});
    at::Tensor target = whole_numbers({3, 5}, at::kLong).clamp_max(3);
    target[0][1] = -100;
    for (const auto& [of_logits, of_target] : {std::pair(S0, S0), std::pair(Shard(2), S1), std::pair(S1, R)}) {
      for (const int64_t reduction : kReductions) {
        beside_plain(mesh, {{logits, {of_logits}}, {target, {of_target}}},
                     [&](const Tensors& x) { return at::cross_entropy_loss(x[0], x[1], {}, reduction); });
      }
    }
  });
}

TEST_CASE("V4: assignments to parts of the sharded dimension are kept, and gradients go around them") {
  on_lines([](const DeviceMesh& mesh) {
    using at::indexing::Slice;
    const at::Tensor rows = sample({2, 4}, 3);
    struct Assignment {
      const char* name;
      std::function<void(at::Tensor&, const at::Tensor&)> run;
    };
    const std::vector<Assignment> assignments = {
        {"a number to rows", [](at::Tensor& x, const at::Tensor&) { x.index_put_({Slice(0, 2)}, 3.0); }},
        {"rows to rows", [](at::Tensor& x, const at::Tensor& v) { x.index_put_({Slice(3, 5)}, v); }},
        {"rows to every third", [](at::Tensor& x, const at::Tensor& v) { x.index_put_({Slice(0, 6, 3)}, v); }},
        {"copy_ into a slice", [](at::Tensor& x, const at::Tensor& v) { x.slice(0, 1, 3).copy_(v); }},
        {"a row", [](at::Tensor& x, const at::Tensor& v) { x.select(0, 5).copy_(v.select(0, 0)); }},
        {"a corner",
         [](at::Tensor& x, const at::Tensor& v) { x.narrow(0, 4, 2).narrow(1, 1, 2).add_(v.narrow(1, 0, 2)); }},
    };
    for (const Placement& placement : {S0, S1, R}) {
      for (const Assignment& assignment : assignments) {
        CAPTURE(to_string(placement));
        CAPTURE(assignment.name);
        beside_plain(mesh, {{sample({6, 4}), {placement}}, {rows, {R}}}, [&](const Tensors& t) {
          at::Tensor x = t[0] * 2;
          assignment.run(x, t[1]);
          return x.pow(2) + t[1].sum();
        });
      }
    }
  });
}

TEST_CASE("V5: nn::init fills a DTensor as it fills a plain tensor") {
  on_lines([](const DeviceMesh& mesh) {
    for (const Placement& placement : {S0, S1, R}) {
      CAPTURE(to_string(placement));
      for (const std::vector<int64_t>& shape : {std::vector<int64_t>{8, 8}, {5, 7}, {2, 3}}) {
        at::Tensor want = sample(shape);
        const at::Tensor got = spread(sample(shape), mesh, {placement});
        torch::nn::init::eye_(want);
        torch::nn::init::eye_(got);
        CHECK(placements_of(got) == Placements{placement});
        CHECK(same(full_tensor(got), want));
        torch::nn::init::constant_(got, 2.5);
        CHECK(same(full_tensor(got), at::full(shape, 2.5, at::kDouble)));
        torch::nn::init::zeros_(got);
        CHECK(same(full_tensor(got), at::zeros(shape, at::kDouble)));
      }
      // This writes element by element.
      at::Tensor want = sample({4, 5, 3});
      const at::Tensor filter = spread(sample({4, 5, 3}), mesh, {placement});
      torch::nn::init::dirac_(want);
      torch::nn::init::dirac_(filter);
      CHECK(same(full_tensor(filter), want));
      // The bound follows from the whole fan-in, not from a piece's.
      const at::Tensor weight = spread(at::zeros({30, 40}, at::kDouble), mesh, {placement});
      torch::nn::init::xavier_uniform_(weight);
      const double largest = full_tensor(weight).abs().max().item<double>(), bound = std::sqrt(6.0 / 70);
      CHECK(largest <= bound);
      CHECK(largest > 0.99 * bound);
    }
  });
}

namespace {

void check_extrema(const DeviceMesh& mesh, const at::Tensor& whole, const Placements& placements) {
  CAPTURE(to_string(placements));
  const auto check = [&](const char* name, const Operator& f) {
    CAPTURE(name);
    beside_plain(mesh, {{whole, placements}}, f);
  };
  check("max", [](const Tensors& x) { return x[0].max(); });
  check("min", [](const Tensors& x) { return x[0].min(); });
  check("argmax", [](const Tensors& x) { return x[0].argmax(); });
  check("argmin", [](const Tensors& x) { return x[0].argmin(); });
  for (const int64_t dim : {0, 1}) {
    CAPTURE(dim);
    check("amax", [&](const Tensors& x) { return x[0].amax(dim); });
    check("amin", [&](const Tensors& x) { return x[0].amin(dim); });
    check("max(dim)", [&](const Tensors& x) { return std::get<0>(x[0].max(dim)); });
    check("indices of max(dim)", [&](const Tensors& x) { return std::get<1>(x[0].max(dim)); });
    check("min(dim)", [&](const Tensors& x) { return std::get<0>(x[0].min(dim, true)); });
    check("indices of min(dim)", [&](const Tensors& x) { return std::get<1>(x[0].min(dim, true)); });
    check("argmax(dim)", [&](const Tensors& x) { return x[0].argmax(dim); });
    check("argmin(dim)", [&](const Tensors& x) { return x[0].argmin(dim, true); });
    check("aminmax", [&](const Tensors& x) { return std::get<1>(at::aminmax(x[0].detach(), dim)); });
  }
}

}  // namespace

TEST_CASE("V7: extrema and their places, shards empty and uneven: nobody waits") {
  on_mesh({4}, [](const DeviceMesh& mesh) {
    for (const Placement& placement : {S0, S1, P}) {
      check_extrema(mesh, sample({2, 3}), {placement});
      check_extrema(mesh, sample({5, 6}), {placement});
    }
    check_extrema(mesh, sample({5, 6}), {RaggedShard(0, {0, 3, 0, 2})});
  });
  on_mesh({3}, [](const DeviceMesh& mesh) { check_extrema(mesh, sample({2, 4}), {S0}); });
  on_mesh({2, 2}, [](const DeviceMesh& mesh) { check_extrema(mesh, sample({2, 3}), {S0, S0}); });
}

TEST_CASE("(2, 3) as S(0) on 4 ranks: the first of equal extrema is found, as one process finds it") {
  on_mesh({4}, [](const DeviceMesh& mesh) {
    const at::Tensor equal = at::ones({2, 3}, at::kDouble),
                     whole = at::tensor({1.0, 7.0, 7.0, 7.0, 0.0, 0.0}, at::kDouble).view({2, 3});
    for (const at::Tensor& t : {equal, whole}) {
      const at::Tensor d = spread(t, mesh, {S0});
      CHECK(same(full_tensor(d.argmax()), t.argmax()));
      CHECK(same(full_tensor(d.argmin()), t.argmin()));
      for (const int64_t dim : {0, 1}) {
        CHECK(same(full_tensor(std::get<1>(d.max(dim))), std::get<1>(t.max(dim))));
        CHECK(same(full_tensor(std::get<1>(d.min(dim))), std::get<1>(t.min(dim))));
      }
    }
  });
}

TEST_CASE("P(sum) of ints: values and dtypes of everyday operators") {
  on_lines([](const DeviceMesh& mesh) {
    for (const at::ScalarType dtype : {at::kInt, at::kLong}) {
      const at::Tensor a = whole_numbers({5, 3}, dtype) + 1, b = whole_numbers({5, 3}, dtype, 2) + 2;
      const auto check = [&](const char* name, const Operator& f) {
        CAPTURE(name);
        beside_plain(mesh, {{a, {P}}, {b, {P}}}, f);
        beside_plain(mesh, {{a, {P}}, {b, {R}}}, f);
        beside_plain(mesh, {{a, {S0}}, {b, {P}}}, f);
      };
      check("sums", [](const Tensors& x) { return x[0] + x[1] * 2 - 3; });
      check("product", [](const Tensors& x) { return x[0] * x[1]; });
      check("quotient", [](const Tensors& x) { return x[0] / x[1]; });
      check("floor", [](const Tensors& x) { return at::floor_divide(x[0] * 7, x[1]); });
      check("remainder", [](const Tensors& x) { return at::remainder(x[0] * 7, x[1]); });
      check("bits", [](const Tensors& x) { return (x[0] & x[1]) | (x[0] ^ 5); });
      check("shift", [](const Tensors& x) { return at::bitwise_left_shift(x[0], x[1]); });
      check("comparison", [](const Tensors& x) { return x[0] < x[1]; });
      check("maximum", [](const Tensors& x) { return at::maximum(x[0], x[1]); });
      check("sum", [](const Tensors& x) { return x[0].sum(0) + x[1].cumsum(0).sum(); });
      check("product of all", [](const Tensors& x) { return x[0].prod() + x[1].amax(); });
      check("matmul", [](const Tensors& x) { return at::matmul(x[0], x[1].t()); });
      check("mean", [](const Tensors& x) { return x[0].mean(0, false, at::kDouble); });
      check("conversion", [](const Tensors& x) { return x[0].to(at::kDouble) / 2 + x[1]; });
      check("where", [](const Tensors& x) { return at::where(x[0] > 2, x[0], x[1]); });
      check("in place", [](const Tensors& x) { return x[0].clone().add_(x[1]).mul_(3).sub_(1); });
    }
  });
}

namespace {

// Returns what the ranks of a job throw, where only rank 1 is given an impossible call; all throw within five seconds.
std::string thrown_by_ranks(const std::function<void(const DeviceMesh&, bool bad)>& body) {
  std::atomic<int> threw = 0;
  std::string text;
  const auto start = std::chrono::steady_clock::now();
  try {
    run_in_process(3, [&](const std::shared_ptr<World>& world) {
      const DeviceMesh mesh = init_device_mesh("cpu", {3}, {}, world);
      try {
        body(mesh, world->rank() == 1);
        full_tensor(spread(at::ones({3}), mesh, {P}));
      } catch (...) {
        ++threw;
        throw;
      }
    });
  } catch (const std::exception& error) {
    text = error.what();
  }
  CHECK(threw == 3);
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
  return text;
}

at::Tensor piece(const at::Tensor& local, const DeviceMesh& mesh) { return from_local(local, mesh, {S0}); }

}  // namespace

TEST_CASE("a rank-local error does not hang the others") {
  struct Row {
    const char* text;
    std::function<void(const DeviceMesh&, bool)> body;
  };
  const std::vector<Row> rows = {
      {"rank 1 of 3",
       [](const DeviceMesh&, bool bad) {
         if (bad) throw std::runtime_error("the user's own");
       }},
      {"index 9 is out of bounds",
       [](const DeviceMesh& mesh, bool bad) {
         at::gather(piece(sample({2, 3}), mesh), 1, piece(at::full({2, 1}, bad ? 9 : 0, at::kLong), mesh));
       }},
      {"Target 9 is out of bounds",
       [](const DeviceMesh& mesh, bool bad) {
         at::nll_loss(piece(sample({2, 3}), mesh), piece(at::full({2}, bad ? 9 : 0, at::kLong), mesh));
       }},
      {"1.5 is no probability",
       [](const DeviceMesh& mesh, bool bad) { piece(at::full({2}, bad ? 1.5 : 0.5), mesh).bernoulli(); }},
      {"-1 is no standard deviation",
       [](const DeviceMesh& mesh, bool bad) { at::normal(0.0, piece(at::full({2}, bad ? -1.0 : 1.0), mesh)); }},
      {"class 9 is outside [0, 3)",
       [](const DeviceMesh& mesh, bool bad) { at::one_hot(piece(at::full({2}, bad ? 9 : 0, at::kLong), mesh), 3); }},
  };
  for (const Row& row : rows) {
    const std::string text = thrown_by_ranks(row.body);
    CAPTURE(row.text);
    CAPTURE(text);
    CHECK(text.find(row.text) != std::string::npos);
  }
}

TEST_CASE("a deviation below zero is refused on every rank") {
  for (const int64_t ranks : {1, 2, 3, 4}) {
    for (const Placement& placement : {S0, R, P}) {
      const at::Tensor whole = at::tensor({1.0, 2.0, -0.5, 1.0, 3.0}, at::kDouble);
      CHECK_THROWS(at::normal(0.0, whole));
      on_mesh({ranks}, [&](const DeviceMesh& mesh) {
        CHECK_THROWS_WITH(at::normal(spread(whole, mesh, {placement}), -2.0), doctest::Contains("found std -2"));
        const auto draw = [&] { full_tensor(at::normal(0.0, spread(whole, mesh, {placement}))); };
        CHECK_THROWS_WITH(draw(), doctest::Contains("-0.5 is no standard deviation"));
      });
    }
  }
}

TEST_CASE("norms of whole numbers, and in types that would not hold them, are refused as LibTorch refuses them") {
  on_lines([](const DeviceMesh& mesh) {
    for (const Placement& placement : {S0, R, P}) {
      CAPTURE(to_string(placement));
      const at::Tensor ints = whole_numbers({5, 3}, at::kLong), d = spread(ints, mesh, {placement});
      for (const auto& f : std::vector<std::function<void(const at::Tensor&)>>{
               [](const at::Tensor& x) { at::linalg_vector_norm(x, 2); },
               [](const at::Tensor& x) { at::linalg_vector_norm(x, 2, at::IntArrayRef{0}, false, at::kDouble); },
               [](const at::Tensor& x) { at::norm(x, 1); },
               [](const at::Tensor& x) { at::norm(x, 2, at::IntArrayRef{1}); },
               [](const at::Tensor& x) { at::linalg_vector_norm(x.to(at::kDouble), 2, {}, false, at::kFloat); },
               [](const at::Tensor& x) { at::linalg_vector_norm(x.to(at::kComplexDouble), 2, {}, false, at::kDouble); },
           }) {
        CHECK_THROWS_AS(f(ints), c10::Error);
        CHECK_THROWS_AS(f(d), c10::Error);
      }
      CHECK(close(full_tensor(at::linalg_vector_norm(d.to(at::kFloat), 2, {}, false, at::kDouble)),
                  at::linalg_vector_norm(ints.to(at::kFloat), 2, {}, false, at::kDouble)));
    }
  });
}

}  // namespace tessera::testing
