// Tests redistributions that are started before they are read, several in one round, and in other dtypes.

#include <algorithm>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/core/InferenceMode.h>
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/measured_costs.h"
#include "tessera/mesh/collectives/checked.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/in_process.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

const Placements kKinds = {S0, S1, R, P, Partial(ReduceOp::kMax), BlockCyclic(0, 2)};
const RedistributeOptions kAsync{.async = true};

struct Case {
  at::Tensor whole;
  Placements from, to;
};

// Has layouts of all kinds and several dtypes; some pairs need no communication.
std::vector<Case> cases(const DeviceMesh& mesh, at::IntArrayRef shape) {
  const std::vector<at::ScalarType> dtypes = {at::kDouble, at::kFloat, at::kLong, at::kShort};
  const auto layouts = all_layouts(mesh.ndim(), kKinds);
  std::vector<Case> out;
  for (std::size_t i = 0; i < layouts.size() * 3; ++i) {
    out.push_back({whole_numbers(shape, dtypes[i % dtypes.size()], static_cast<int64_t>(i)),
                   layouts[i % layouts.size()], layouts[i * 7 % layouts.size()]});
  }
  return out;
}

std::vector<at::Tensor> sources(const std::vector<Case>& all, const DeviceMesh& mesh) {
  std::vector<at::Tensor> out;
  for (const Case& each : all) out.push_back(spread(each.whole, mesh, each.from));
  return out;
}

std::vector<Placements> targets(const std::vector<Case>& all) {
  std::vector<Placements> out;
  for (const Case& each : all) out.push_back(each.to);
  return out;
}

void check_arrived(const std::vector<Case>& all, const std::vector<at::Tensor>& moved) {
  REQUIRE(moved.size() == all.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    CAPTURE(i);
    CAPTURE(to_string(all[i].from));
    CAPTURE(to_string(all[i].to));
    CHECK(placements_of(moved[i]) == all[i].to);
    CHECK(same(full_tensor(moved[i]), all[i].whole));
  }
}

// Rank 0 starts alone; the other ranks wait for a key that it sets once its call has returned. Returns the largest
// number of collectives of one redistribution.
int64_t begin_moves_alone(const DeviceMesh& mesh, const std::vector<std::pair<Placements, Placements>>& moves) {
  World& world = mesh.world();
  const c10::intrusive_ptr<c10d::Store> store = world.store();
  int64_t turn = 0, most = 0;
  const auto check = [&](const auto& begin) {
    const std::string key = fmt::format("begin_alone/{}/{}", mesh.to_string(), turn++);
    if (world.rank() != 0) store->wait({key}, std::chrono::seconds(20));
    const std::vector<at::Tensor> moved = begin();
    if (world.rank() == 0) store->set(key, "returned");
    return moved;
  };
  for (const int64_t size : {12, 300}) {  // 300 x 300 is 720 KB, more than is sent without a handshake
    const at::Tensor whole = whole_numbers({size, size});
    for (const auto& move : moves) {
      const Placements &from = move.first, &to = move.second;
      CAPTURE(to_string(from));
      CAPTURE(to_string(to));
      const at::Tensor source = spread(whole, mesh, from);
      CommCounter counter(mesh);
      redistribute(source, to);  // makes the process groups, which needs all ranks
      most = std::max(most, counter.total());
      const auto one = check([&] { return std::vector{redistribute(source, to, kAsync)}; });
      CHECK(same(full_tensor(one[0]), whole));
      const auto two = check([&] { return redistribute_many({source, source}, {to, to}, kAsync); });
      CHECK(same(full_tensor(two[1]), whole));
      CHECK(same(full_tensor(two[0]), whole));
    }
  }
  return most;
}

void begin_alone(const std::shared_ptr<World>& world) {
  const Checked off(*world, false);  // under Checked, ranks wait for each other before a collective
  begin_moves_alone(init_device_mesh(device_name(), {world->size()}, {}, world),
                    {{{S0}, {R}}, {{S0}, {S1}}, {{P}, {R}}, {{P}, {S0}}, {{S1}, {BlockCyclic(0, 2)}}});
  // Some need two rounds; the second starts when the result is read.
  if (world->size() == 4) {
    const int64_t most =
        begin_moves_alone(init_device_mesh(device_name(), {2, 2}, {}, world),
                          {{{S0, S1}, {S1, R}}, {{P, S0}, {S0, R}}, {{P, P}, {S0, R}}, {{S0, P}, {P, S1}}});
    CHECK(most == 2);
  }
}

}  // namespace

TESSERA_RANKS_TEST_CASE("async: the first reader waits, in any order that ranks share", {1, 2, 3, 4}) {
  for (const DeviceMesh& mesh : meshes()) {
    for (const auto& shape : std::vector<std::vector<int64_t>>{{8, 4}, {5, 7}, {0, 3}}) {
      const std::vector<Case> all = cases(mesh, shape);
      const std::vector<at::Tensor> given = sources(all, mesh);
      std::vector<at::Tensor> moved;
      for (std::size_t i = 0; i < all.size(); ++i) moved.push_back(redistribute(given[i], all[i].to, kAsync));
      for (std::size_t i = 0; i < all.size(); ++i) CHECK(placements_of(moved[i]) == all[i].to);
      // Another collective runs meanwhile, and the last result is read first.
      CHECK(same(full_tensor(given[0]), all[0].whole));
      for (std::size_t i = all.size(); i-- > 0;) CHECK(same(full_tensor(moved[i]), all[i].whole));
      check_arrived(all, moved);
    }
  }
}

TESSERA_RANKS_TEST_CASE("async: a started redistribution is counted at once, and one that is never read does no harm",
                        {2, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor whole = whole_numbers({8, 4});
  const at::Tensor source = spread(whole, mesh, {S0});
  {
    const CommCounter counter(mesh);
    const at::Tensor moved = redistribute(source, {S1}, kAsync);
    CHECK(counter.count("all_to_all") == 1);
    CHECK(same(to_local(moved), piece_of(whole, mesh, {S1})));
    CHECK(counter.total() == 1);
    CHECK(counter.count_by_op("redistribute") == 1);
  }
  for (int i = 0; i < 20; ++i) redistribute(source, {R}, kAsync);
  CHECK(same(full_tensor(source), whole));
}

TESSERA_RANKS_TEST_CASE("async: returns before the other ranks have called it", {2, 3, 4}) { begin_alone(world()); }

TESSERA_RANKS_TEST_CASE("async: a thread may read a result that has come while another one communicates", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor whole = whole_numbers({6, 4});
  const at::Tensor source = spread(whole, mesh, {S0});
  const std::vector<at::Tensor> moved = redistribute_many({source, source}, {{S1}, {R}}, kAsync);
  CHECK(same(full_tensor(moved[0]), whole));  // both have come
  at::Tensor read;
  {
    const World::Exclusive as_in_a_collective(mesh.world());
    std::thread([&] { read = to_local(moved[1]).clone(); }).join();
  }
  CHECK(same(read, whole));
}

TEST_CASE("async: returns before the other ranks have called it, where they are threads") {
  for (const int64_t size : {2, 3, 4}) run_in_process(size, begin_alone);
}

TESSERA_RANKS_TEST_CASE("async: an operator, a view, autograd and another thread read it as any other", {2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor whole = sample({6, 4});
  at::Tensor source = spread(whole, mesh, {S0});
  source.requires_grad_(true);
  const at::Tensor moved = redistribute(source, {R}, kAsync);
  const at::Tensor viewed = redistribute(source, {S1}, kAsync).t();
  const at::Tensor weight = sample({6, 4}, 3);
  at::Tensor sum = (moved * spread(weight, mesh, {R})).sum() + (viewed.t() * spread(weight, mesh, {S1})).sum();
  CHECK(close(full_tensor(sum).detach(), (whole * weight).sum() * 2));
  sum.backward();
  CHECK(placements_of(source.grad()) == Placements{S0});
  CHECK(close(full_tensor(source.grad()), weight * 2));

  const at::Tensor later = redistribute(source.detach(), {R}, kAsync);
  at::Tensor read;
  std::thread([&] { read = to_local(later).clone(); }).join();
  CHECK(same(read, whole));
}

TESSERA_RANKS_TEST_CASE("async: a result started outside InferenceMode and read inside is a normal tensor", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor whole = sample({6, 4});
  const at::Tensor moved = redistribute(spread(whole, mesh, {S0}), {R}, kAsync);
  {
    const c10::InferenceMode inference;
    CHECK(same(to_local(moved), whole));
  }
  CHECK_FALSE(to_local(moved).is_inference());
}

TESSERA_RANKS_TEST_CASE("async: under InferenceMode, where writes are not counted, the results are right", {2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor whole = whole_numbers({6, 4});
  const c10::InferenceMode inference;
  const at::Tensor source = spread(whole, mesh, {S0});
  for (const Placement& to : {S1, R}) {
    const at::Tensor moved = redistribute(source, {to}, kAsync);
    source.fill_(9);
    CHECK(same(full_tensor(moved), whole));
    source.copy_(spread(whole, mesh, {S0}));
  }
}

TESSERA_RANKS_TEST_CASE("measured costs are the same on every rank, and plans by them give right results", {1, 2, 4}) {
  for (const DeviceMesh& mesh : meshes()) {
    const CostModel costs = measured_costs(mesh);
    std::vector<double> figures;
    for (const Link& link : costs.links) {
      CHECK(link.microseconds >= 0);
      CHECK(link.bytes_per_microsecond > 0);
      figures.push_back(link.microseconds);
      figures.push_back(link.bytes_per_microsecond);
    }
    const at::Tensor mine = at::tensor(figures, on(at::kDouble));
    const at::Tensor others =
        full_tensor(from_local(mine, mesh, Placements(figures.size() / 2, Partial(ReduceOp::kMax))));
    CHECK(same(mine, others));
    const Placements from(figures.size() / 2, S0);
    const Placements to(figures.size() / 2, S1);
    const at::Tensor moved = redistribute(spread(whole_numbers({8, 4}), mesh, from), to, {.cost_model = costs});
    CHECK(same(full_tensor(moved), whole_numbers({8, 4})));
  }
  const DeviceMesh fake = init_device_mesh("cpu", {2}, {}, World::fake(0, 2));
  CHECK_THROWS_WITH_AS(measured_costs(fake), doctest::Contains("a fake world sends nothing"), std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE("a reduction that refuses one rank's values ends the others", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor source = from_local(at::full({2}, mesh.local_rank(0) == 0 ? -1.0 : 1.0, on(at::kFloat)), mesh, {S0});
  const at::Tensor other = from_local(at::ones({2}, on(at::kFloat)), mesh, {S0});
  CHECK_THROWS_WITH_AS(redistribute_many({source, other}, {{NormPartial(2)}, {R}}),
                       doctest::Contains("negative elements"), std::runtime_error);
}

TESSERA_RANKS_TEST_CASE("async: a source that is written while it is sent is refused, on every rank", {2, 3}) {
  const DeviceMesh mesh = line();
  const char* const text = "was written while it was being sent";
  const at::Tensor source = spread(sample({6, 4}), mesh, {S0});
  const at::Tensor moved = redistribute(source, {R}, kAsync);
  source.add_(1);
  CHECK_THROWS_WITH_AS(to_local(moved), doctest::Contains(text), std::runtime_error);
  CHECK_THROWS_WITH_AS(full_tensor(moved), doctest::Contains(text), std::runtime_error);
  const at::Tensor again = redistribute(source, {R}, kAsync);
  to_local(source).mul_(2);
  CHECK_THROWS_WITH_AS(to_local(again), doctest::Contains(text), std::runtime_error);
  const at::Tensor whole = full_tensor(source);
  CHECK(same(to_local(redistribute(source, {R})), whole));
}

TESSERA_RANKS_TEST_CASE("redistribute_many: every result is right, whatever the other tensors are", {1, 2, 3, 4}) {
  for (const DeviceMesh& mesh : meshes()) {
    for (const auto& shape : std::vector<std::vector<int64_t>>{{8, 4}, {5, 7}, {1, 1}}) {
      const std::vector<Case> all = cases(mesh, shape);
      check_arrived(all, redistribute_many(sources(all, mesh), targets(all)));
      check_arrived(all, redistribute_many(sources(all, mesh), targets(all), kAsync));
    }
  }
  CHECK(redistribute_many({}, {}).empty());
}

TESSERA_RANKS_TEST_CASE("redistribute_many: one message from each rank to each, for all tensors together", {2, 4}) {
  const DeviceMesh mesh = line();
  const std::vector<at::ScalarType> dtypes = {at::kFloat, at::kLong, at::kBool, at::kDouble, at::kBFloat16};
  std::vector<at::Tensor> sharded, pending;
  for (const at::ScalarType dtype : dtypes)
    sharded.push_back(spread(whole_numbers({5, 3}, at::kDouble).to(dtype), mesh, {S0}));
  for (int i = 0; i < 5; ++i) pending.push_back(spread(whole_numbers({5, 3}, at::kDouble, i), mesh, {P}));
  const std::vector<Placements> five_s1(5, {S1}), five_r(5, {R}), five_s0(5, {S0});
  const auto counted = [&](const std::vector<at::Tensor>& tensors, const std::vector<Placements>& to,
                           const char* kind) {
    const CommCounter counter(mesh);
    redistribute_many(tensors, to);
    CHECK(counter.count(kind) == 1);
    CHECK(counter.total() == 1);
  };
  counted(sharded, five_s1, "all_to_all");
  counted(sharded, five_r, "all_gather");
  counted(pending, five_r, "all_reduce");
  counted(pending, five_s0, "reduce_scatter");
}

TESSERA_RANKS_TEST_CASE("redistribute_many: gradients are redistributed together, where there are any", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor weight = sample({6, 4}, 9);
  std::vector<at::Tensor> given;
  for (const Placement& p : {S0, S1, P, R}) given.push_back(spread(sample({6, 4}), mesh, {p}).requires_grad_(p != R));
  const std::vector<at::Tensor> moved = redistribute_many(given, {{R}, {R}, {R}, {S0}});
  (full_tensor(moved[0]) * weight + full_tensor(moved[2]) * weight).sum().backward();
  CHECK(close(full_tensor(given[0].grad()), weight));
  CHECK_FALSE(given[1].grad().defined());
  const at::Tensor used = leaf(sample({2, 4})), unused = leaf(sample({2, 4}));
  const std::vector<at::Tensor> pieces = {from_local(used, mesh, {S0}), from_local(unused, mesh, {S0})};
  redistribute_many(pieces, {{R}, {R}})[0].sum().backward();
  CHECK(same(used.grad(), at::ones({2, 4}, on(at::kDouble))));
  CHECK_FALSE(unused.grad().defined());
  CHECK(close(full_tensor(given[2].grad()), weight));
  CHECK_FALSE(given[3].grad().defined());
  for (std::size_t i = 0; i < given.size(); ++i) CHECK(moved[i].requires_grad() == given[i].requires_grad());
}

TESSERA_RANKS_TEST_CASE("redistribute_many: gradients that nobody needs are not communicated", {2, 3}) {
  const DeviceMesh mesh = line();
  for (const bool frozen : {false, true}) {
    CAPTURE(frozen);
    const at::Tensor asked = spread(sample({6, 4}), mesh, {S0}).requires_grad_(true);
    const at::Tensor other = spread(sample({6, 4}), mesh, {R}).requires_grad_(!frozen);
    const std::vector<at::Tensor> moved = redistribute_many({asked, other}, {{S1}, {S0}});
    CHECK(moved[1].requires_grad() == !frozen);
    const at::Tensor loss = to_local(moved[0]).sum() + to_local(moved[1]).sum();
    const CommCounter counter(mesh);
    // The gradient of `other` would come back by an all_gather.
    const at::Tensor gradient = torch::autograd::grad({loss}, {asked})[0];
    CHECK(counter.count("all_to_all") == 1);
    CHECK(counter.total() == 1);
    CHECK(same(full_tensor(gradient), at::ones({6, 4}, on(at::kDouble))));
  }
}

TESSERA_RANKS_TEST_CASE("redistribute_many: bad input is refused before any communication", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor t = spread(sample({6, 4}), mesh, {S0});
  const CommCounter counter(mesh);
  CHECK_THROWS_WITH_AS(redistribute_many({t, t}, {{R}}),
                       doctest::Contains("redistribute_many: 2 tensors and 1 placements"), std::invalid_argument);
  const DeviceMesh other = init_device_mesh(device_name(), {2}, {"other"}, mesh.world_ptr());
  const std::string where = "tensor 1 is on mesh " + other.to_string() + ", tensor 0 on " + mesh.to_string();
  CHECK_THROWS_WITH_AS(redistribute_many({t, spread(sample({6, 4}), other, {S0})}, {{R}, {R}}),
                       doctest::Contains(where.c_str()), std::invalid_argument);
  CHECK_THROWS_WITH_AS(redistribute_many({t, t}, {{R}, {Shard(5)}}),
                       doctest::Contains("redistribute: S(5) is outside a tensor of 2 dimensions"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(redistribute(t, {R}, {.cost_model = CostModel::gloo(2)}), doctest::Contains("redistribute: "),
                       std::invalid_argument);
  CHECK(counter.total() == 0);
}

TESSERA_RANKS_TEST_CASE("forward_dtype: the value is sent in it and has it; the gradient has the input's dtype",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor whole = whole_numbers({6, 4}, at::kFloat);
  for (const Placement& from : {S0, S1, P}) {
    for (const Placement& to : {R, S0, S1}) {
      CAPTURE(to_string(Placements{from, to}));
      at::Tensor source = spread(whole, mesh, {from}).requires_grad_(true);
      const CommCounter counter(mesh);
      const at::Tensor moved = redistribute(source, {to}, {.forward_dtype = at::kBFloat16});
      CHECK((moved.scalar_type() == at::kBFloat16));
      CHECK((to_local(moved).scalar_type() == at::kBFloat16));
      const int64_t bytes = counter.total_bytes();
      CHECK(same(full_tensor(moved).detach(), whole.to(at::kBFloat16)));
      full_tensor(moved).sum().backward();
      CHECK((source.grad().scalar_type() == at::kFloat));
      CHECK(same(full_tensor(source.grad()), at::ones({6, 4}, on(at::kFloat))));
      const CommCounter wide(mesh);
      redistribute(source, {to});
      CHECK(wide.total_bytes() == 2 * bytes);
    }
  }
}

TESSERA_RANKS_TEST_CASE("forward_dtype: a reduce_scatter of bfloat16 adds in float32", {3, 4}) {
  const DeviceMesh mesh = line();
  const int64_t n = mesh.size();
  // From 256 on bfloat16 has every second number, and ties go to a multiple of 4: there 256 + 1 is 256, so that terms
  // of 1 are lost which are added to it in the ranks' order, or in pairs. The sums 258 and 259 are 258 and 260 in
  // bfloat16.
  const at::Tensor term = at::full({n}, mesh.local_rank(0) == 1 ? 256.0 : 1.0, on(at::kFloat));
  const at::Tensor moved = redistribute(from_local(term, mesh, {P}), {S0}, {.forward_dtype = at::kBFloat16});
  const at::Tensor sum = at::full({1}, 256.0 + static_cast<double>(n - 1), on(at::kFloat)).to(at::kBFloat16);
  CHECK(sum.item<double>() == (n == 3 ? 258 : 260));
  CHECK(same(to_local(moved), sum));
}

TESSERA_RANKS_TEST_CASE("forward_dtype: a part of a converted tensor does not keep the whole in memory", {2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor whole = whole_numbers({6, 4}, at::kFloat);
  const at::Tensor moved = redistribute(spread(whole, mesh, {R}), {S0}, {.forward_dtype = at::kBFloat16});
  const at::Tensor piece = to_local(moved);
  CHECK(piece.storage().nbytes() == piece.nbytes());
  CHECK(same(full_tensor(moved), whole.to(at::kBFloat16)));
}

TESSERA_RANKS_TEST_CASE("forward_dtype: pending pieces are converted only where the value is then the converted one",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  struct Row {
    ReduceOp op;
    at::ScalarType from, to;
    bool refused;
  };
  const std::vector<Row> rows = {
      {ReduceOp::kSum, at::kFloat, at::kLong, true},       {ReduceOp::kMax, at::kFloat, at::kBool, true},
      {ReduceOp::kMax, at::kLong, at::kInt, true},         {ReduceOp::kProduct, at::kComplexFloat, at::kFloat, true},
      {ReduceOp::kSum, at::kLong, at::kFloat, false},      {ReduceOp::kSum, at::kLong, at::kInt, false},
      {ReduceOp::kMax, at::kInt, at::kLong, false},        {ReduceOp::kMax, at::kInt, at::kDouble, false},
      {ReduceOp::kProduct, at::kFloat, at::kDouble, false}};
  for (const Row& row : rows) {
    const std::string text =
        fmt::format("{} of {} as {}", tessera::to_string(row.op), c10::toString(row.from), c10::toString(row.to));
    CAPTURE(text);
    const at::Tensor whole = whole_numbers({6, 4}, row.from);
    const at::Tensor source = spread(whole, mesh, {Partial(row.op)});
    for (const Placement& to : {R, S0, Partial(row.op)}) {
      const auto move = [&] { return redistribute(source, {to}, {.forward_dtype = row.to}); };
      if (row.refused) {
        CHECK_THROWS_WITH_AS(move(), doctest::Contains("redistribute first, and convert the result"),
                             std::invalid_argument);
      } else {
        CHECK(same(full_tensor(move()), whole.to(row.to)));
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("backward_dtype: the gradient is sent in it", {2, 3}) {
  const DeviceMesh mesh = line();
  at::Tensor source = spread(whole_numbers({6, 4}, at::kDouble), mesh, {S0}).requires_grad_(true);
  const at::Tensor moved = redistribute(source, {R}, {.grad_placements = Placements{R}, .backward_dtype = at::kFloat});
  const at::Tensor terms = moved * spread(sample({6, 4}), mesh, {R});
  const double third = 1.0 / 3.0;
  (terms.sum() * third).backward();
  CHECK((source.grad().scalar_type() == at::kDouble));
  const at::Tensor expected = (sample({6, 4}) * third).to(at::kFloat).to(at::kDouble);
  CHECK(same(full_tensor(source.grad()), expected));
}

TESSERA_RANKS_TEST_CASE("redistribute_many: options hold for each tensor, with one result unused", {2, 3}) {
  const DeviceMesh mesh = line();
  const Placements kinds = {S0, R, P};
  const std::vector<at::ScalarType> dtypes = {at::kDouble, at::kFloat, at::kDouble};
  const auto leaves = [&] {
    std::vector<at::Tensor> out;
    for (std::size_t i = 0; i < kinds.size(); ++i) {
      out.push_back(spread(whole_numbers({5, 3}, dtypes[i]), mesh, {kinds[i]}).requires_grad_(true));
    }
    return out;
  };
  const auto loss_of = [&](const at::Tensor& first, const at::Tensor& last) {
    const at::Tensor weights = spread(sample({5, 3}), mesh, {R});
    return (first * weights).sum() + (last * weights * 2.0).sum() / 3.0;
  };
  for (const bool async : {false, true}) {
    CAPTURE(async);
    const RedistributeOptions options = {
        .grad_placements = Placements{R}, .forward_dtype = at::kDouble, .backward_dtype = at::kFloat, .async = async};
    const std::vector<at::Tensor> together = leaves(), single = leaves();
    const std::vector<at::Tensor> moved = redistribute_many(together, {{R}, {S1}, {S1}}, options);
    loss_of(moved[0], moved[2]).backward();
    loss_of(redistribute(single[0], {R}, options), redistribute(single[2], {S1}, options)).backward();
    CHECK_FALSE(together[1].grad().defined());
    for (const std::size_t i : {std::size_t{0}, std::size_t{2}}) {
      CAPTURE(i);
      REQUIRE(together[i].grad().defined());
      CHECK((together[i].grad().scalar_type() == dtypes[i]));
      CHECK(placements_of(together[i].grad()) == placements_of(single[i].grad()));
      CHECK(same(full_tensor(together[i].grad()), full_tensor(single[i].grad())));
    }
    CHECK(same(full_tensor(together[2].grad()), (sample({5, 3}) * 2.0 / 3.0).to(at::kFloat).to(at::kDouble)));
  }
}

TESSERA_RANKS_TEST_CASE("forward_dtype and backward_dtype that have no gradients are refused", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor source = spread(whole_numbers({6, 4}), mesh, {S0}).requires_grad_(true);
  CHECK_THROWS_WITH_AS(redistribute(source, {R}, {.forward_dtype = at::kLong}),
                       doctest::Contains("a tensor that requires grad as Long"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(redistribute(source, {R}, {.backward_dtype = at::kLong}),
                       doctest::Contains("a gradient as Long; backward_dtype must be floating"), std::invalid_argument);
  const at::Tensor complex = spread(whole_numbers({6, 4}, at::kComplexDouble), mesh, {S0}).requires_grad_(true);
  CHECK_THROWS_WITH_AS(redistribute(complex, {R}, {.backward_dtype = at::kFloat}),
                       doctest::Contains("the gradient of ComplexDouble as Float, which would lose its imaginary part"),
                       std::invalid_argument);
  CHECK_NOTHROW(redistribute(complex, {R}, {.backward_dtype = at::kComplexFloat}));
  const at::Tensor average = spread(whole_numbers({6, 4}), mesh, {Partial(ReduceOp::kAvg)});
  CHECK_THROWS_WITH_AS(redistribute(average, {R}, {.forward_dtype = at::kLong}),
                       doctest::Contains("redistribute: avg of Long is not defined"), std::invalid_argument);
}
