#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <numbers>
#include <stdexcept>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/random.h"
#include "tessera/gpu_kernels/philox.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/in_process.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Holds an operator that draws into its input, or a tensor like it.
struct Operator {
  const char* name;
  at::Tensor input;
  at::Tensor (*draw)(const at::Tensor& t);
};

std::vector<Operator> operators() {
  const at::Tensor ones = at::ones({7, 5}, on(at::kFloat));
  const at::Tensor half = at::full({7, 5}, 0.5, on(at::kDouble));
  const at::Tensor whole = at::zeros({7, 5}, on(at::kLong));
  return {
      {"uniform_", ones, [](const at::Tensor& t) { return t.clone().uniform_(-1, 2); }},
      {"uniform_ double", half, [](const at::Tensor& t) { return t.clone().uniform_(-1, 2); }},
      {"uniform_ bfloat16", ones.to(at::kBFloat16), [](const at::Tensor& t) { return t.clone().uniform_(); }},
      {"uniform_ complex", ones.to(at::kComplexFloat), [](const at::Tensor& t) { return t.clone().uniform_(); }},
      {"uniform_ of a transposed", ones.t(), [](const at::Tensor& t) { return t.clone().uniform_(-1, 2); }},
      {"normal_", ones, [](const at::Tensor& t) { return t.clone().normal_(1, 2); }},
      {"normal_ double", half, [](const at::Tensor& t) { return t.clone().normal_(1, 2); }},
      {"normal of means", ones, [](const at::Tensor& t) { return at::normal(t, 2.0); }},
      {"normal of deviations", ones, [](const at::Tensor& t) { return at::normal(2.0, t); }},
      {"normal of both", half, [](const at::Tensor& t) { return at::normal(t, t); }},
      {"exponential_", ones, [](const at::Tensor& t) { return t.clone().exponential_(3); }},
      {"log_normal_", ones, [](const at::Tensor& t) { return t.clone().log_normal_(0, 0.5); }},
      {"geometric_", ones, [](const at::Tensor& t) { return t.clone().geometric_(0.25); }},
      {"cauchy_", ones, [](const at::Tensor& t) { return t.clone().cauchy_(1, 2); }},
      {"bernoulli", half, [](const at::Tensor& t) { return at::bernoulli(t); }},
      {"bernoulli.p", half, [](const at::Tensor& t) { return at::bernoulli(t, 0.25); }},
      {"bernoulli_", whole, [](const at::Tensor& t) { return t.clone().bernoulli_(0.25); }},
      {"bernoulli_ by tensor", half, [](const at::Tensor& t) { return t.clone().bernoulli_(t); }},
      {"random_", whole, [](const at::Tensor& t) { return t.clone().random_(); }},
      {"random_ to", whole, [](const at::Tensor& t) { return t.clone().random_(10); }},
      {"random_ from", ones, [](const at::Tensor& t) { return t.clone().random_(-3, 9); }},
      {"rand_like", half, [](const at::Tensor& t) { return at::rand_like(t); }},
      {"randn_like", half, [](const at::Tensor& t) { return at::randn_like(t, at::kFloat); }},
      {"randint_like", whole, [](const at::Tensor& t) { return at::randint_like(t, -2, 5); }},
      {"dropout", half, [](const at::Tensor& t) { return at::dropout(t, 0.5, true); }},
      {"native_dropout", half, [](const at::Tensor& t) { return std::get<0>(at::native_dropout(t, 0.5, true)); }},
      {"a mask", half, [](const at::Tensor& t) { return std::get<1>(at::native_dropout(t, 0.5, true)); }},
  };
}

}  // namespace

TESSERA_RANKS_TEST_CASE("every random operator gives an element the same number with any sharding", {1, 2, 3, 4}) {
  at::Generator mine = at::globalContext().defaultGenerator(device());
  mine.set_current_seed(100 + static_cast<uint64_t>(world()->rank()));  // must not matter
  for (const DeviceMesh& mesh : meshes()) {
    const Placements whole(static_cast<std::size_t>(mesh.ndim()), R);
    for (const Operator& op : operators()) {
      CAPTURE(op.name);
      const auto drawn = [&](const Placements& placements) {
        manual_seed(3, *world());
        const at::Tensor out = op.draw(spread(op.input, mesh, placements));
        CHECK(world()->random_state().counter == 1);
        return out;
      };
      const at::Tensor expected = to_local(drawn(whole));
      for (const Placements& placements :
           all_layouts(mesh.ndim(), {R, S0, Shard(1), BlockCyclic(0, 2), BlockCyclic(1, 1)})) {
        CAPTURE(to_string(placements));
        CHECK(same(to_local(drawn(placements)), piece_of(expected, mesh, placements)));
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("the factories draw by an element's global position too", {1, 2, 3, 4}) {
  constexpr uint64_t kSeed = (uint64_t{5} << 40) + 17;
  const auto word = [](uint64_t element, uint32_t draw) {
    const auto block = static_cast<uint32_t>(element / 4);
    return tessera::detail::philox({block, 0, draw, 0}, {17, 5U << 8})[element % 4];
  };
  for (const DeviceMesh& mesh : meshes()) {
    for (const Placements& placements : all_layouts(mesh.ndim(), {R, S0, Shard(1)})) {
      CAPTURE(to_string(placements));
      manual_seed(kSeed, *world());
      const at::Tensor first = full_tensor(tessera::rand({5, 3}, mesh, placements, at::kFloat));
      const at::Tensor second = full_tensor(tessera::rand({5, 3}, mesh, placements, at::kFloat));
      for (int64_t i = 0; i < first.numel(); ++i) {
        const auto at = static_cast<uint64_t>(i);
        CHECK(first.flatten()[i].item<double>() == static_cast<double>(word(at, 0) >> 8) / (1 << 24));
        CHECK(second.flatten()[i].item<double>() == static_cast<double>(word(at, 1) >> 8) / (1 << 24));
      }
      const at::Tensor normal = full_tensor(tessera::randn({5, 3}, mesh, placements, at::kFloat));
      for (int64_t i = 0; i < normal.numel(); i += 2) {
        const auto at = static_cast<uint64_t>(i);
        const double radius = std::sqrt(-2 * std::log((static_cast<double>(word(at, 2)) + 1) / 0x1p32));
        const double angle = 2 * std::numbers::pi * (static_cast<double>(word(at + 1, 2) >> 8) / (1 << 24));
        CHECK(normal.flatten()[i].item<double>() == doctest::Approx(radius * std::cos(angle)).epsilon(1e-4));
        if (i + 1 < normal.numel()) {
          CHECK(normal.flatten()[i + 1].item<double>() == doctest::Approx(radius * std::sin(angle)).epsilon(1e-4));
        }
      }
      const at::Tensor whole = full_tensor(tessera::randint(-3, 4, {5, 3}, mesh, placements));
      CHECK((whole.scalar_type() == at::kLong));
      CHECK(whole.ge(-3).logical_and(whole.lt(4)).all().item<bool>());
    }
  }
}

TESSERA_RANKS_TEST_CASE("numbers are distributed as asked", {1}) {
  const DeviceMesh mesh = line();
  manual_seed(7, mesh);
  CHECK(mesh.world().random_state().seed == 7);
  const at::Tensor none = spread(at::empty({400, 500}, on(at::kDouble)), mesh, {R});
  const auto mean = [](const at::Tensor& t) { return to_local(t).to(at::kDouble).mean().item<double>(); };
  const auto deviation = [](const at::Tensor& t) { return to_local(t).to(at::kDouble).std().item<double>(); };
  struct Row {
    const char* name;
    at::Tensor drawn;
    double mean;
    double deviation;
  };
  const auto in = [&](at::ScalarType type) { return none.to(type).clone(); };
  const std::vector<Row> rows = {
      {"uniform", in(at::kDouble).uniform_(2, 6), 4, 4 / std::sqrt(12.0)},
      {"uniform float", in(at::kFloat).uniform_(2, 6), 4, 4 / std::sqrt(12.0)},
      {"uniform half", in(at::kHalf).uniform_(2, 6), 4, 4 / std::sqrt(12.0)},
      {"uniform bfloat16", in(at::kBFloat16).uniform_(-1, 1), 0, 2 / std::sqrt(12.0)},
      {"normal", in(at::kDouble).normal_(3, 2), 3, 2},
      {"normal float", in(at::kFloat).normal_(3, 2), 3, 2},
      {"normal bfloat16", in(at::kBFloat16).normal_(), 0, 1},
      {"exponential", in(at::kFloat).exponential_(4), 0.25, 0.25},
      {"bernoulli", in(at::kFloat).bernoulli_(0.3), 0.3, std::sqrt(0.21)},
      {"bernoulli of a bool", in(at::kBool).bernoulli_(0.3), 0.3, std::sqrt(0.21)},
      {"random", in(at::kLong).random_(-5, 6), 0, std::sqrt(10.0)},
      {"random byte", in(at::kByte).random_(), 127.5, std::sqrt((256.0 * 256 - 1) / 12)},
      {"geometric", in(at::kFloat).geometric_(0.25), 4, std::sqrt(0.75) * 4},
      {"log_normal", in(at::kDouble).log_normal_(0, 0.5).log(), 0, 0.5},
      {"cauchy", in(at::kDouble).cauchy_(0, 1).atan(), 0, std::numbers::pi / std::sqrt(12.0)},
      {"complex normal", at::view_as_real(in(at::kComplexDouble).normal_()), 0, std::sqrt(0.5)},
  };
  for (const Row& row : rows) {
    CAPTURE(row.name);
    const double sigma = row.deviation / std::sqrt(static_cast<double>(none.numel()));
    CHECK(std::abs(mean(row.drawn) - row.mean) < 4 * sigma);
    CHECK(deviation(row.drawn) == doctest::Approx(row.deviation).epsilon(0.02));
  }
  const at::Tensor half = to_local(in(at::kHalf).uniform_());
  CHECK(half.max().item<double>() < 1);
  CHECK(half.min().item<double>() == 0);
  CHECK(to_local(in(at::kFloat).exponential_()).min().item<double>() > 0);
  const at::Tensor dice = to_local(in(at::kLong).random_(1, 7));
  CHECK(std::get<0>(at::_unique(dice)).equal(at::arange(1, 7, on(at::kLong))));
}

TESSERA_RANKS_TEST_CASE("neighbours, draws and seeds are unrelated", {1}) {
  const DeviceMesh mesh = line();
  const auto draw = [&](uint64_t seed) {
    manual_seed(seed, mesh.world());
    const at::Tensor first = to_local(tessera::randn({100000}, mesh, {R}, at::kDouble));
    return std::pair(first, to_local(tessera::randn({100000}, mesh, {R}, at::kDouble)));
  };
  const auto correlation = [](const at::Tensor& a, const at::Tensor& b) {
    return std::abs((a * b).mean().item<double>());
  };
  const auto [a, b] = draw(1);
  const auto [c, d] = draw(2);
  const double limit = 4 / std::sqrt(100000.0);
  for (const int64_t lag : {1, 2, 3, 4, 8}) CHECK(correlation(a.slice(0, lag), a.slice(0, 0, -lag)) < limit);
  CHECK(correlation(a, b) < limit);
  CHECK(correlation(a, c) < limit);
  CHECK(correlation(b, c) < limit);
  CHECK(correlation(b, d) < limit);
}

TESSERA_RANKS_TEST_CASE("a seed repeats what was drawn, and the state of the default generator stays", {1, 2}) {
  const DeviceMesh mesh = line();
  auto generator = at::globalContext().defaultGenerator(device());
  const at::Tensor before = generator.get_state();
  manual_seed(11, *world());
  const at::Tensor first = full_tensor(tessera::randn({6, 3}, mesh, {S0}));
  const at::Tensor second = full_tensor(tessera::randn({6, 3}, mesh, {S0}));
  CHECK_FALSE(same(first, second));
  manual_seed(11, *world());
  CHECK(same(full_tensor(tessera::randn({6, 3}, mesh, {S0})), first));
  const RandomState saved = world()->random_state();
  const at::Tensor third = full_tensor(at::dropout(spread(at::ones({6, 3}, on(at::kFloat)), mesh, {S0}), 0.5, true));
  world()->random_state() = saved;
  CHECK(same(full_tensor(at::dropout(spread(at::ones({6, 3}, on(at::kFloat)), mesh, {S0}), 0.5, true)), third));
  CHECK(same(generator.get_state(), before));
  manual_seed(12, *world());
  CHECK_FALSE(same(full_tensor(tessera::randn({6, 3}, mesh, {S0})), first));
}

TESSERA_RANKS_TEST_CASE("a caller's generator is honoured and advanced", {2}) {
  const DeviceMesh mesh = line();
  const auto draw = [&](at::Generator generator) {
    return full_tensor(spread(at::zeros({4, 3}, on(at::kFloat)), mesh, {S0}).normal_(0, 1, generator));
  };
  const auto seeded = [] {
    at::Generator generator = at::globalContext().defaultGenerator(device()).clone();
    generator.set_current_seed(5);
    return generator;
  };
  const at::Generator a = seeded(), b = seeded();
  const at::Tensor first = draw(a);
  CHECK(same(first, draw(b)));
  CHECK_FALSE(same(first, draw(a)));
}

TESSERA_RANKS_TEST_CASE("dropout keeps its share and scales the rest; its gradient has the same mask", {2}) {
  const DeviceMesh mesh = line();
  manual_seed(1, *world());
  at::Tensor x = spread(at::ones({64, 64}, on(at::kDouble)), mesh, {S0});
  x.requires_grad_(true);
  const at::Tensor y = at::dropout(x, 0.25, true);
  const at::Tensor values = full_tensor(y.detach());
  const double kept = values.ne(0).to(at::kDouble).mean().item<double>();
  CHECK(kept > 0.7);
  CHECK(kept < 0.8);
  CHECK(close(values, values.ne(0).to(at::kDouble) / 0.75));
  y.sum().backward();
  CHECK(close(full_tensor(x.grad()), values));
  CHECK(at::dropout(x, 0.25, false).is_same(x));
  const at::Tensor q = spread(sample({2, 2, 4, 3}), mesh, {R});
  const at::Tensor whole = to_local(at::scaled_dot_product_attention(q, q, q, {}, 0.5));
  manual_seed(2, *world());
  const at::Tensor again = to_local(at::scaled_dot_product_attention(q, q, q, {}, 0.5));
  CHECK_FALSE(same(again, whole));
  // Attention with dropout is the same sharded by heads as whole.
  manual_seed(2, *world());
  const at::Tensor heads = redistribute(q, {Shard(1)});
  CHECK(close(full_tensor(at::scaled_dot_product_attention(heads, heads, heads, {}, 0.5)), again));
}

TESSERA_RANKS_TEST_CASE("alpha dropout keeps mean and variance by its formula; features go as a whole", {1, 2, 3}) {
  // Self-Normalizing Neural Networks (Klambauer et al., 2017), section 3: what is dropped becomes -lambda * alpha, and
  // all is scaled by a and shifted by b.
  constexpr double kAlpha = 1.7580993408473766, kDropped = 0.3;
  const double a = 1 / std::sqrt((kAlpha * kAlpha * kDropped + 1) * (1 - kDropped)), b = kAlpha * a * kDropped;
  const DeviceMesh mesh = line();
  manual_seed(1, *world());
  const at::Tensor plain = sample({101, 5, 3});
  for (const bool features : {false, true}) {
    CAPTURE(features);
    at::Tensor x = spread(plain, mesh, {S0}).requires_grad_(true);
    const at::Tensor y = features ? at::feature_alpha_dropout(x, kDropped, true) : at::alpha_dropout(x, kDropped, true);
    y.sum().backward();
    const at::Tensor gradient = full_tensor(x.grad());
    const at::Tensor kept = gradient.ne(0);
    CHECK(close(gradient, kept.to(plain.dtype()) * a));
    CHECK(close(full_tensor(y.detach()), at::where(kept, plain * a + b, at::full_like(plain, b - kAlpha * a))));
    const double share = kept.to(at::kDouble).mean().item<double>();
    CHECK(share > 0.6);
    CHECK(share < 0.8);
    CHECK(kept.eq(kept.narrow(2, 0, 1)).all().item<bool>() == features);
  }
}

TESSERA_RANKS_TEST_CASE("rrelu draws a slope for each negative element, which is its derivative", {1, 2, 3}) {
  constexpr double kLower = 0.1, kUpper = 0.4;
  const DeviceMesh mesh = line();
  manual_seed(1, *world());
  const at::Tensor plain = sample({101, 7});
  at::Tensor x = spread(plain, mesh, {S0}).requires_grad_(true);
  const at::Tensor y = at::rrelu(x, kLower, kUpper, true);
  y.sum().backward();
  const at::Tensor slopes = full_tensor(x.grad()), negative = plain.lt(0);
  CHECK(close(full_tensor(y.detach()), plain * slopes));
  CHECK(slopes.masked_select(~negative).eq(1).all().item<bool>());
  const at::Tensor drawn = slopes.masked_select(negative);
  REQUIRE(drawn.numel() > 200);
  CHECK(drawn.min().item<double>() >= kLower);
  CHECK(drawn.max().item<double>() <= kUpper);
  CHECK(std::abs(drawn.mean().item<double>() - (kLower + kUpper) / 2) < 0.03);
  CHECK(drawn.std().item<double>() > 0.07);  // of a uniform distribution: 0.087
}

TESSERA_RANKS_TEST_CASE("a draw has the strides that LibTorch gives it, on the pieces too", {1, 2, 3}) {
  const at::Tensor plain = at::full({6, 4}, 0.5, on(at::kDouble)).t();
  for (const Placement& placement : {R, S0, S1}) {
    CAPTURE(to_string(placement));
    const at::Tensor x = spread(at::full({6, 4}, 0.5, on(at::kDouble)), line(), {placement}).t();
    for (const auto& draw : std::vector<std::function<at::Tensor(const at::Tensor&)>>{
             [](const at::Tensor& t) { return at::bernoulli(t); },
             [](const at::Tensor& t) { return at::normal(t, 1.0); },
             [](const at::Tensor& t) { return at::rand_like(t, at::TensorOptions(), at::MemoryFormat::Contiguous); },
             [](const at::Tensor& t) { return at::rand_like(t); }}) {
      const at::Tensor drawn = draw(x), want = draw(plain);
      CHECK(drawn.strides() == want.strides());
      if (!want.is_contiguous()) continue;
      CHECK(to_local(drawn).is_contiguous());
      CHECK(drawn.view({-1}).size(0) == 24);
    }
  }
}

TEST_CASE("what another thread draws meanwhile changes nothing of what replicas draw") {
  std::atomic<bool> done{false};
  std::thread other([&] {
    while (!done) at::rand({16});
  });
  for (const int64_t size : {1, 2}) {
    run_in_process(size, [](const std::shared_ptr<World>& world) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world->size()}, {}, world);
      const at::Tensor weights = from_local(at::ones({64}), mesh, {R});
      const auto draw = [&] {
        manual_seed(3, *world);
        at::Tensor all = at::zeros({64}, at::kLong);
        for (int i = 0; i < 50; ++i) all += to_local(at::multinomial(weights, 64, /*replacement=*/true));
        return all;
      };
      const at::Tensor first = draw();
      for (int i = 0; i < 4; ++i) CHECK(at::equal(draw(), first));
    });
  }
  done = true;
  other.join();
}

TESSERA_RANKS_TEST_CASE("factories make each rank's own piece, without communication", {1, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor many = at::arange(1001, on(at::kLong)).to(at::kBFloat16);
  CHECK(same(full_tensor(tessera::arange(1001, mesh, {S0}, at::kBFloat16)), many));
  CHECK(same(full_tensor(tessera::ones({5, 3}, mesh, {S0})), at::ones({5, 3}, on(at::kFloat))));
  CHECK(same(full_tensor(tessera::zeros({5, 3}, mesh, {Shard(-1)}, at::kLong)), at::zeros({5, 3}, on(at::kLong))));
  CHECK(same(full_tensor(tessera::full({5}, 2.5, mesh, {S0})), at::full({5}, 2.5, on(at::kFloat))));
  CHECK(same(full_tensor(tessera::full({2}, 7, mesh, {R})), at::full({2}, 7, on(at::kLong))));
  CHECK(same(full_tensor(tessera::arange(10, mesh, {S0})), at::arange(10, on(at::kLong))));
  CHECK((tessera::empty({5, 3}, mesh, {S0}, at::kBFloat16).scalar_type() == at::kBFloat16));
}

TESSERA_RANKS_TEST_CASE("arange counts places in the whole, where two mesh dimensions cut it and where blocks do",
                        {4}) {
  const at::Tensor place = at::arange(11, on(at::kLong));
  for (const at::ScalarType dtype : {at::kLong, at::kDouble, at::kBFloat16}) {
    const at::Tensor plane = tessera::arange(11, mesh_over({2, 2}), {S0, S0}, dtype);
    const std::vector<Interval> parts = {{0, 3}, {3, 6}, {6, 9}, {9, 11}};
    const Interval mine = parts[static_cast<std::size_t>(rank())];
    CHECK(same(to_local(plane), place.slice(0, mine.begin, mine.end).to(dtype)));
    CHECK(same(full_tensor(plane), place.to(dtype)));
    const at::Tensor blocks = tessera::arange(11, line(), {BlockCyclic(0, 2)}, dtype);  // the first rank's are 0 1 8 9
    const int64_t begin = 2 * rank();
    const at::Tensor want = at::cat({place.slice(0, begin, begin + 2), place.slice(0, begin + 8, begin + 10)});
    CHECK(same(to_local(blocks), want.to(dtype)));
    CHECK(same(full_tensor(blocks), place.to(dtype)));
  }
}

TESSERA_RANKS_TEST_CASE("ranks that draw nothing keep count: replicas agree on what is drawn next", {3}) {
  const DeviceMesh mesh = line();
  manual_seed(3, *world());
  const at::Tensor piece =
      at::rand_like(spread(at::zeros({2}, on(at::kFloat)), mesh, {S0}));  // the last rank's is empty
  CHECK(to_local(piece).numel() == (mesh.local_rank(0) < 2 ? 1 : 0));
  CHECK(world()->random_state().counter == 1);
  const at::Tensor next =
      all_gather(to_local(at::rand_like(spread(at::zeros({5}, on(at::kFloat)), mesh, {R}))), mesh, 0);
  CHECK(at::equal(next, next.slice(0, 0, 1).expand_as(next)));
}

TESSERA_RANKS_TEST_CASE("what cannot be drawn is refused before anything is", {1, 2}) {
  const DeviceMesh mesh = line();
  const at::Tensor t = spread(at::ones({2, 3}, on(at::kFloat)), mesh, {S0});
  const at::Tensor bytes = t.to(at::kByte);
  const uint64_t counter = mesh.world().random_state().counter;
  CHECK_THROWS_WITH(t.bernoulli_(1.5), "aten::bernoulli_: p is 1.5; give a number from 0 to 1");
  CHECK_THROWS_WITH(at::native_dropout(t, -0.5, true), "aten::native_dropout: p is -0.5; give a number from 0 to 1");
  CHECK_THROWS_WITH(t.geometric_(0), "aten::geometric_: p is 0; give a number between 0 and 1");
  CHECK_THROWS_WITH(t.log_normal_(0, -1), "aten::log_normal_: std is -1; give a number above 0");
  CHECK_THROWS_WITH(t.log_normal_(0, 0), "aten::log_normal_: std is 0; give a number above 0");
  CHECK_THROWS_WITH(t.cauchy_(0, -1), "aten::cauchy_: sigma is -1; give a number above 0");
  CHECK_THROWS_WITH(t.cauchy_(0, 0), "aten::cauchy_: sigma is 0; give a number above 0");
  CHECK_THROWS_WITH(t.exponential_(0), "aten::exponential_: lambd is 0; give a number above 0");
  CHECK_THROWS_WITH(t.uniform_(3, 2), doctest::Contains("from=3 > to=2"));
  CHECK_THROWS_WITH(t.random_(4, 4),
                    "aten::random_: no number is at least 4 and below 4; give a first number below the end");
  CHECK_THROWS_WITH(bytes.random_(300),
                    "aten::random_: Byte has the whole numbers from 0 to 255, not all from 0 to 299");
  CHECK_THROWS_WITH(at::randint_like(bytes, -1, 5),
                    "aten::randint_like: Byte has the whole numbers from 0 to 255, not all from -1 to 4");
  CHECK_THROWS_WITH(tessera::randint(3, 3, {2}, mesh, {S0}),
                    "randint: no number is at least 3 and below 3; give a first number below the end");
  CHECK_THROWS_WITH(tessera::randint(0, 300, {2}, mesh, {S0}, at::kByte),
                    "randint: Byte has the whole numbers from 0 to 255, not all from 0 to 299");
  CHECK_THROWS_WITH(tessera::randint(0, 100000, {2}, mesh, {S0}, at::kHalf),
                    "randint: Half has the whole numbers from -2048 to 2048, not all from 0 to 99999");
  CHECK_THROWS_WITH(tessera::randint(0, 5, {2}, mesh, {S0}, at::kBool),
                    "randint: Bool has the whole numbers from 0 to 1, not all from 0 to 4");
  CHECK_THROWS_AS(tessera::randint(0, 5, {1}, mesh, {S0}, at::kComplexFloat), c10::NotImplementedError);
  // It has one element, which the first rank alone holds.
  CHECK_THROWS_WITH(tessera::rand({1}, mesh, {S0}, at::kLong),
                    doctest::Contains("rand: Long cannot be drawn; give Half, BFloat16, Float or Double"));
  CHECK_THROWS_WITH(tessera::randn({1}, mesh, {S0}, at::kBool), doctest::Contains("randn: Bool cannot be drawn"));
  CHECK_THROWS_WITH_AS(tessera::rand({1}, mesh, {S0}, at::kFloat8_e5m2),
                       doctest::Contains("rand: Float8_e5m2 cannot be drawn"), std::invalid_argument);
  CHECK(mesh.world().random_state().counter == counter);
  // Only the first rank has an element.
  for (const at::ScalarType type : {at::kBool, at::kComplexFloat, at::kUInt16}) {
    CHECK_THROWS_AS(tessera::arange(1, mesh, {S0}, type), c10::NotImplementedError);
  }
}

TESSERA_RANKS_TEST_CASE("a dtype that cannot be drawn is refused before anything is", {1, 2}) {
  const DeviceMesh mesh = line();
  const at::Tensor t = spread(at::ones({2, 3}, on(at::kFloat)), mesh, {S0});
  const auto in = [&](at::ScalarType type) { return t.to(type); };
  const uint64_t counter = mesh.world().random_state().counter;
  struct Row {
    const char* text;
    std::function<void()> draw;
  };
  const std::vector<Row> rows = {
      {"aten::normal_: numbers of Long", [&] { in(at::kLong).normal_(); }},
      {"aten::normal_: numbers of Float8_e5m2", [&] { in(at::kFloat8_e5m2).normal_(); }},
      {"aten::normal: numbers of Long", [&] { at::normal(in(at::kLong), 2.0); }},
      {"aten::uniform_: numbers of Long", [&] { in(at::kLong).uniform_(); }},
      {"aten::exponential_: numbers of Long", [&] { in(at::kLong).exponential_(); }},
      {"aten::exponential_: numbers of ComplexFloat", [&] { in(at::kComplexFloat).exponential_(); }},
      {"aten::log_normal_: numbers of Long", [&] { in(at::kLong).log_normal_(); }},
      {"aten::log_normal_: numbers of ComplexFloat", [&] { in(at::kComplexFloat).log_normal_(); }},
      {"aten::cauchy_: numbers of Long", [&] { in(at::kLong).cauchy_(); }},
      {"aten::cauchy_: numbers of ComplexFloat", [&] { in(at::kComplexFloat).cauchy_(); }},
      {"aten::bernoulli_: numbers of ComplexFloat", [&] { in(at::kComplexFloat).bernoulli_(0.5); }},
      {"aten::bernoulli_: numbers of UInt16", [&] { in(at::kUInt16).bernoulli_(0.5); }},
      {"aten::bernoulli_: numbers of Float8_e5m2", [&] { in(at::kFloat8_e5m2).bernoulli_(0.5); }},
      {"aten::geometric_: numbers of UInt32", [&] { in(at::kUInt32).geometric_(0.5); }},
      {"aten::geometric_: numbers of Bool", [&] { in(at::kBool).geometric_(0.5); }},
      {"aten::geometric_: numbers of ComplexFloat", [&] { in(at::kComplexFloat).geometric_(0.5); }},
      {"aten::rand_like: numbers of Long", [&] { at::rand_like(t, at::kLong); }},
      {"aten::randn_like: numbers of Long", [&] { at::randn_like(in(at::kLong)); }},
  };
  for (const Row& row : rows) {
    CAPTURE(row.text);
    CHECK_THROWS_WITH_AS(row.draw(), doctest::Contains(row.text), std::invalid_argument);
  }
  CHECK_THROWS_WITH(in(at::kLong).geometric_(1), "aten::geometric_: p is 1; give a number between 0 and 1");
  CHECK_THROWS_WITH(in(at::kLong).log_normal_(),
                    "aten::log_normal_: numbers of Long cannot be drawn; give Half, BFloat16, Float or Double");
  CHECK(mesh.world().random_state().counter == counter);
}

TEST_CASE("a draw that a CUDA graph would hold is refused on the host") {
  const auto alone = World::create({});
  const DeviceMesh mesh = init_device_mesh("cpu", {1}, {}, alone);
  CHECK_THROWS_WITH_AS(CapturedDraws(*alone, mesh.device()),
                       "CapturedDraws: the device is cpu; a CUDA graph needs a GPU", std::invalid_argument);
  const at::Tensor t = from_local(at::ones({2, 3}), mesh, {R});
  const uint64_t number = 0;  // stands for the one on a GPU
  alone->random_state().base = &number;
  CHECK_THROWS_WITH(t.uniform_(0, 1, at::detail::createCPUGenerator(1)),
                    doctest::Contains("would be the same in every replay; leave the generator out"));
  CHECK_THROWS_WITH(t.uniform_(), doctest::Contains("which a CUDA graph cannot repeat"));
}
