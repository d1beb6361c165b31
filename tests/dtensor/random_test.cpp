#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/random.h"
#include "tessera/mesh/collectives.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

const Placement S0 = Shard(0);
const Placement R = Replicate();

// Whether every rank of a line holds the same numbers; whether no two do.
bool all_alike(const at::Tensor& local) {
  const at::Tensor rows = all_gather(local.contiguous(), line(), 0);
  return at::equal(rows, rows.slice(0, 0, 1).expand_as(rows));
}
bool all_different(const at::Tensor& local) {
  const at::Tensor rows = all_gather(local.contiguous(), line(), 0);
  for (int64_t i = 0; i < rows.size(0); ++i) {
    for (int64_t j = 0; j < i; ++j) {
      if (at::equal(rows[i], rows[j])) return false;
    }
  }
  return true;
}

}  // namespace

TESSERA_RANKS_TEST_CASE("replicas draw alike and shards differently, from every random operator", {1, 2, 4}) {
  const DeviceMesh mesh = line();
  manual_seed(3, *world());
  const at::Tensor whole = spread(at::ones({8, 16}), mesh, {R});
  const at::Tensor split = spread(at::ones({8, 16}), mesh, {S0});
  at::Generator mine = at::globalContext().defaultGenerator(at::kCPU);
  mine.set_current_seed(100 + static_cast<uint64_t>(world()->rank()));
  const auto draws = [](const at::Tensor& t) {
    return std::vector<at::Tensor>{at::dropout(t, 0.5, true), at::rand_like(t),    at::randn_like(t),
                                   at::bernoulli(t * 0.5),    t.clone().normal_(), t.clone().uniform_()};
  };
  for (const at::Tensor& t : draws(whole)) CHECK(all_alike(to_local(t)));
  for (const at::Tensor& t : draws(split)) CHECK(all_different(to_local(t)));
  CHECK(all_alike(to_local(tessera::rand({4, 4}, mesh, {R}))));
  CHECK(all_different(to_local(tessera::randn({8, 4}, mesh, {S0}))));
  // The counter has moved on alike, whatever was drawn.
  CHECK(all_alike(to_local(tessera::rand({4, 4}, mesh, {R}))));
}

TESSERA_RANKS_TEST_CASE("on two mesh dimensions, those that share a piece draw alike", {4}) {
  const DeviceMesh mesh = mesh_over({2, 2});
  for (const Placements& placements : {Placements{S0, R}, {R, S0}}) {
    const at::Tensor t = to_local(at::dropout(spread(at::ones({8, 16}), mesh, placements), 0.5, true));
    const int64_t replicas = placements[0] == S0 ? 1 : 0;
    const at::Tensor alike = all_gather(t.contiguous(), mesh, replicas);
    CHECK(at::equal(alike[0], alike[1]));
    const at::Tensor apart = all_gather(t.contiguous(), mesh, 1 - replicas);
    CHECK_FALSE(at::equal(apart[0], apart[1]));
  }
}

TESSERA_RANKS_TEST_CASE("a seed repeats what was drawn, and the state of the default generator stays", {1, 2}) {
  const DeviceMesh mesh = line();
  auto generator = at::globalContext().defaultGenerator(at::kCPU);
  const at::Tensor before = generator.get_state();
  manual_seed(11, *world());
  const at::Tensor first = full_tensor(tessera::randn({6, 3}, mesh, {S0}));
  const at::Tensor second = full_tensor(tessera::randn({6, 3}, mesh, {S0}));
  CHECK_FALSE(same(first, second));
  manual_seed(11, *world());
  CHECK(same(full_tensor(tessera::randn({6, 3}, mesh, {S0})), first));
  const RandomState saved = world()->random_state();
  const at::Tensor third = full_tensor(at::dropout(spread(at::ones({6, 3}), mesh, {S0}), 0.5, true));
  world()->random_state() = saved;
  CHECK(same(full_tensor(at::dropout(spread(at::ones({6, 3}), mesh, {S0}), 0.5, true)), third));
  CHECK(same(generator.get_state(), before));
  manual_seed(12, *world());
  CHECK_FALSE(same(full_tensor(tessera::randn({6, 3}, mesh, {S0})), first));
}

TESSERA_RANKS_TEST_CASE("a caller's generator is honoured and advanced", {2}) {
  const DeviceMesh mesh = line();
  const auto draw = [&](at::Generator generator) {
    return full_tensor(spread(at::zeros({4, 3}), mesh, {S0}).normal_(0, 1, generator));
  };
  at::Generator a = at::detail::createCPUGenerator(5);
  at::Generator b = at::detail::createCPUGenerator(5);
  const at::Tensor first = draw(a);
  CHECK(same(first, draw(b)));
  CHECK_FALSE(same(first, draw(a)));
}

TESSERA_RANKS_TEST_CASE("dropout keeps its share and scales the rest; its gradient has the same mask", {2}) {
  const DeviceMesh mesh = line();
  manual_seed(1, *world());
  at::Tensor x = spread(at::ones({64, 64}, at::kDouble), mesh, {S0});
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
  // Attention that drops draws alike on replicas too.
  const at::Tensor q = spread(sample({2, 2, 4, 3}), mesh, {R});
  CHECK(all_alike(to_local(at::scaled_dot_product_attention(q, q, q, {}, 0.5))));
}

TESSERA_RANKS_TEST_CASE("factories make each rank's own piece, for nothing", {1, 3}) {
  const DeviceMesh mesh = line();
  CHECK(same(full_tensor(tessera::ones({5, 3}, mesh, {S0})), at::ones({5, 3})));
  CHECK(same(full_tensor(tessera::zeros({5, 3}, mesh, {Shard(-1)}, at::kLong)), at::zeros({5, 3}, at::kLong)));
  CHECK(same(full_tensor(tessera::full({5}, 2.5, mesh, {S0})), at::full({5}, 2.5)));
  CHECK(same(full_tensor(tessera::full({2}, 7, mesh, {R})), at::full({2}, 7)));
  CHECK(same(full_tensor(tessera::arange(10, mesh, {S0})), at::arange(10)));
  CHECK((tessera::empty({5, 3}, mesh, {S0}, at::kBFloat16).scalar_type() == at::kBFloat16));
}

TESSERA_RANKS_TEST_CASE("ranks that draw nothing keep count: replicas agree on what is drawn next", {3}) {
  const DeviceMesh mesh = line();
  manual_seed(3, *world());
  const at::Tensor piece = at::rand_like(spread(at::zeros({2}), mesh, {S0}));  // the last rank's is empty
  CHECK(to_local(piece).numel() == (mesh.local_rank(0) < 2 ? 1 : 0));
  CHECK(all_alike(to_local(at::rand_like(spread(at::zeros({5}), mesh, {R})))));
}
