// Tests FusedAdamW beside torch::optim::AdamW on whole parameters.

#include <functional>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/optim/adamw.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/fused_adamw.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/harness/refused.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

// One parameter on both sides.
struct Pair {
  at::Tensor ours, plain;

  void set_gradients(int64_t seed) {
    const at::Tensor gradient = sample(plain.sizes(), seed, plain.scalar_type());
    plain.mutable_grad() = gradient.clone();
    ours.mutable_grad() = is_dtensor(ours) ? spread(gradient, mesh_of(ours), placements_of(ours)) : gradient.clone();
  }
};

std::vector<Pair> make_pairs(at::ScalarType dtype) {
  std::vector<Pair> out;
  const auto add = [&](const std::vector<int64_t>& sizes, const std::optional<DeviceMesh>& mesh,
                       const Placements& placements) {
    const at::Tensor whole = sample(sizes, static_cast<int64_t>(out.size()), dtype);
    out.push_back({mesh ? leaf(whole, *mesh, placements) : leaf(whole), leaf(whole)});
  };
  for (const DeviceMesh& mesh : meshes()) {
    const auto dims = static_cast<std::size_t>(mesh.ndim());
    add({5, 3}, mesh, Placements(dims, Shard(0)));
    add({2, 7}, mesh, Placements(dims, Shard(1)));
    add({4}, mesh, Placements(dims, Replicate()));
    add({1, 3}, mesh, Placements(dims, Shard(0)));  // some ranks hold nothing
  }
  add({3, 2}, std::nullopt, {});
  return out;
}

}  // namespace

TESSERA_RANKS_TEST_CASE("FusedAdamW equals torch::optim::AdamW on shards, on several meshes and beside plain tensors",
                        {1, 2, 3, 4}) {
  for (const auto& [dtype, limit] :
       {std::pair(at::kDouble, device().is_cpu() ? 1e-12 : 1e-6), std::pair(at::kFloat, 1e-5)}) {
    for (const bool amsgrad : {false, true}) {
      CAPTURE(amsgrad);
      std::vector<Pair> pairs = make_pairs(dtype);
      std::vector<at::Tensor> ours, plain;
      for (const Pair& each : pairs) {
        ours.push_back(each.ours);
        plain.push_back(each.plain);
      }
      FusedAdamW fused(ours, {.lr = 0.05, .beta2 = 0.9, .eps = 1e-3, .weight_decay = 0.1, .amsgrad = amsgrad});
      torch::optim::AdamW theirs(
          plain, torch::optim::AdamWOptions(0.05).betas({0.9, 0.9}).eps(1e-3).weight_decay(0.1).amsgrad(amsgrad));
      const CommCounter counter(line());
      for (int64_t step = 0; step < 4; ++step) {
        for (std::size_t i = 0; i < pairs.size(); ++i) {
          if (step != 1 || i != 0) pairs[i].set_gradients(10 * step + static_cast<int64_t>(i));
        }
        if (step == 2) {
          fused.set_lr(0.01);
          dynamic_cast<torch::optim::AdamWOptions&>(theirs.param_groups()[0].options()).lr(0.01);
        }
        fused.step();
        theirs.step();
        fused.zero_grad(/*set_to_none=*/step % 2 == 0);
        if (step % 2 == 0) {
          theirs.zero_grad();
        } else {
          theirs.zero_grad(/*set_to_none=*/false);
        }
      }
      CHECK(counter.total() == 0);
      for (std::size_t i = 0; i < pairs.size(); ++i) {
        CAPTURE(i);
        const at::Tensor got = pairs[i].ours.detach();
        CHECK(close(is_dtensor(got) ? full_tensor(got) : got, pairs[i].plain.detach(), limit));
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("FusedAdamW gives its state to torch::optim::AdamW and takes it back, and both go on alike",
                        {1, 2, 3}) {
  const double limit = device().is_cpu() ? 1e-12 : 1e-6;
  for (const bool amsgrad : {false, true}) {
    CAPTURE(amsgrad);
    std::vector<Pair> pairs = make_pairs(at::kDouble);
    std::vector<at::Tensor> ours, plain;
    for (const Pair& each : pairs) {
      ours.push_back(each.ours);
      plain.push_back(each.plain);
    }
    const auto step_with = [&](auto& optimizer, int64_t seed) {
      for (std::size_t i = 1; i < pairs.size(); ++i) pairs[i].set_gradients(seed + static_cast<int64_t>(i));
      optimizer.step();  // the first parameter never has a gradient, and so no state
    };
    FusedAdamW fused(ours,
                     {.lr = 0.05, .beta1 = 0.8, .beta2 = 0.9, .eps = 1e-3, .weight_decay = 0.1, .amsgrad = amsgrad});
    torch::optim::AdamW reference(
        plain, torch::optim::AdamWOptions(0.05).betas({0.8, 0.9}).eps(1e-3).weight_decay(0.1).amsgrad(amsgrad));
    for (const int64_t seed : {0, 10}) {
      step_with(fused, seed);
      reference.step();
    }
    torch::optim::AdamW theirs(ours);
    fused.give_state(theirs);
    const auto& given = dynamic_cast<const torch::optim::AdamWOptions&>(theirs.param_groups()[0].options());
    CHECK((given == dynamic_cast<const torch::optim::AdamWOptions&>(reference.param_groups()[0].options())));
    std::vector<at::Tensor> kept;
    for (const at::Tensor& each : ours) kept.push_back(each.detach().clone());
    FusedAdamW other(ours, {.amsgrad = amsgrad});
    step_with(other, 40);
    other.take_state(theirs);
    const auto after = [&](auto& optimizer) {
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < ours.size(); ++i) ours[i].copy_(kept[i]);
      step_with(optimizer, 20);
      std::vector<at::Tensor> out;
      for (const at::Tensor& each : ours)
        out.push_back(is_dtensor(each) ? full_tensor(each.detach()) : each.detach().clone());
      return out;
    };
    // AdamW shares the moments with `fused`, and so is the last to change them.
    const std::vector<at::Tensor> by_other = after(other);
    const std::vector<at::Tensor> by_theirs = after(theirs);
    reference.step();  // with the gradients of the last step of the others
    for (std::size_t i = 0; i < ours.size(); ++i) {
      CAPTURE(i);
      CHECK(close(by_other[i], by_theirs[i], limit));
      CHECK(close(by_theirs[i], plain[i].detach(), limit));
    }
    CHECK(theirs.state().size() == ours.size() - 1);
  }
}

TESSERA_RANKS_TEST_CASE("two FusedAdamW, with decay and without, keep their states in one torch::optim::AdamW",
                        {1, 2}) {
  const auto parameters = [] { return std::vector<at::Tensor>{leaf(sample({3})), leaf(sample({2}, 1))}; };
  const std::vector<at::Tensor> ours = parameters(), theirs = parameters();
  const auto groups = [](const std::vector<at::Tensor>& of) {
    return std::vector<torch::optim::OptimizerParamGroup>{
        torch::optim::OptimizerParamGroup({of[0]}, std::make_unique<torch::optim::AdamWOptions>(0.1)),
        torch::optim::OptimizerParamGroup(
            {of[1]}, std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(0.2).weight_decay(0)))};
  };
  const auto set_gradients = [&](int64_t seed) {
    for (const auto* const list : {&ours, &theirs}) {
      for (const at::Tensor& each : *list) each.mutable_grad() = sample(each.sizes(), seed);
    }
  };
  torch::optim::AdamW plain(groups(theirs)), files(groups(ours));
  FusedAdamW decay({ours[0]}, {.lr = 0.1}), none({ours[1]}, {.lr = 0.2, .weight_decay = 0});
  const auto step = [&](int64_t seed) {
    set_gradients(seed);
    decay.step();
    none.step();
    plain.step();
  };
  step(1);
  step(2);
  decay.give_state(files);
  none.give_state(files);
  CHECK(files.state().size() == 2);
  FusedAdamW decay_again({ours[0]}), none_again({ours[1]});
  decay_again.take_state(files);
  none_again.take_state(files);
  set_gradients(3);
  decay_again.step();
  none_again.step();
  plain.step();
  for (std::size_t i = 0; i < ours.size(); ++i) CHECK(close(ours[i].detach(), theirs[i].detach()));
}

TESSERA_RANKS_TEST_CASE("FusedAdamW refuses the state of other parameters and of several groups with their own options",
                        {1, 2}) {
  const at::Tensor x = leaf(sample({3})), y = leaf(sample({2}));
  FusedAdamW fused({x, y});
  torch::optim::AdamW one(std::vector<at::Tensor>{x}), other(std::vector<at::Tensor>{x, leaf(sample({2}))});
  check_refused([&] { fused.give_state(one); }, "has 1 parameters, of which 1 are among the 2 here; make it from");
  check_refused([&] { fused.take_state(other); },
                "group 0 of the optimizer has 2 parameters, of which 1 are among the 2 here; make it from");
  torch::optim::AdamW large(std::vector<at::Tensor>{x, y}, torch::optim::AdamWOptions().amsgrad(true));
  check_refused([&] { fused.take_state(large); }, "amsgrad is true in the optimizer and false here; make both alike");
  torch::optim::AdamW twice(std::vector<at::Tensor>{x, x});
  check_refused([&] { fused.take_state(twice); }, "has 1 parameters, of which 1 are among the 2 here");
  torch::optim::AdamW changed(std::vector<at::Tensor>{x, y});
  for (const at::Tensor& each : {x, y}) each.mutable_grad() = at::ones_like(each);
  changed.step();
  dynamic_cast<torch::optim::AdamWOptions&>(changed.param_groups()[0].options()).amsgrad(true);
  FusedAdamW with_largest({x, y}, {.amsgrad = true});
  check_refused([&] { with_largest.take_state(changed); }, "the optimizer lacks a moment of a parameter");
  torch::optim::AdamW two({torch::optim::OptimizerParamGroup({x}), torch::optim::OptimizerParamGroup({y})});
  dynamic_cast<torch::optim::AdamWOptions&>(two.param_groups()[1].options()).lr(0.5);
  check_refused([&] { fused.take_state(two); }, "group 1 of the optimizer has other options than group 0");
}

TESSERA_RANKS_TEST_CASE("FusedAdamW pairs elements by their index, whatever the order of the gradient's memory",
                        {1, 2}) {
  const DeviceMesh mesh = init_device_mesh(device_name(), {world_size()}, {"tp"}, world());
  const at::Tensor whole = sample({4, 6});
  for (const bool spread_out : {false, true}) {
    CAPTURE(spread_out);
    const at::Tensor ours = spread_out ? leaf(whole, mesh, {Shard(1)}) : leaf(whole), plain = leaf(whole);
    FusedAdamW fused({ours});
    torch::optim::AdamW reference({plain});
    for (int step = 0; step < 3; ++step) {
      const at::Tensor gradient = sample({6, 4}, step).t();  // column-major, and row-major where it is a leaf's
      plain.mutable_grad() = gradient.contiguous();
      ours.mutable_grad() = spread_out ? spread(sample({6, 4}, step), mesh, {Shard(0)}).t() : gradient;
      fused.step();
      reference.step();
    }
    CHECK(close(spread_out ? full_tensor(ours.detach()) : ours.detach(), plain.detach(), 1e-6));
  }
}

TESSERA_RANKS_TEST_CASE("LibTorch's fused operators pair elements by their index, whatever memory pieces have",
                        {1, 2}) {
  const DeviceMesh mesh = init_device_mesh(device_name(), {world_size()}, {"tp"}, world());
  const int64_t n = mesh.size();
  const auto row_major = [&](int64_t seed) { return sample({4, 6}, seed + 10 * rank()); };
  const auto column_major = [&](int64_t seed) { return row_major(seed).t().contiguous().t(); };
  const auto with_gaps = [&](int64_t seed) { return at::stack({row_major(seed), row_major(seed)}, 2).select(2, 0); };
  using Make = std::function<at::Tensor(int64_t seed)>;
  const auto step = [&](const Make& parameter, const Make& gradient, const Make& moment) {
    const auto spread_out = [&](const at::Tensor& piece) {
      return from_local(piece, mesh, {Shard(0)}, {.shape = std::vector<int64_t>{4 * n, 6}});
    };
    const at::Tensor p = spread_out(parameter(1)), m = spread_out(moment(3)), v = spread_out(row_major(4).abs());
    const at::Tensor steps = at::ones({}, on(at::kFloat));
    at::_fused_adamw_({p}, {spread_out(gradient(2))}, {m}, {v}, {}, {steps}, 1e-3, 0.9, 0.999, 0.01, 1e-8, false,
                      false);
    return std::vector<at::Tensor>{to_local(p).contiguous(), to_local(m).contiguous(), to_local(v).contiguous()};
  };
  const std::vector<at::Tensor> want = step(row_major, row_major, row_major);
  const std::vector<Make> all = {row_major, column_major, with_gaps};
  for (const Make& parameter : all) {
    for (const Make& gradient : all) {
      for (const Make& moment : all) {
        const std::vector<at::Tensor> got = step(parameter, gradient, moment);
        for (std::size_t i = 0; i < want.size(); ++i) CHECK(same(got[i], want[i]));
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("FusedAdamW on a rank outside the mesh of its parameters does nothing there", {3}) {
  const DeviceMesh mesh(world(), device().type(), Mesh({2}, {"tp"}, {2, 0}));
  const at::Tensor whole = sample({5, 3}), gradient = sample({5, 3}, 2);
  const at::Tensor ours = leaf(distribute_tensor(whole, mesh, {Shard(0)}, kNoSource)), plain = leaf(whole);
  ours.mutable_grad() = distribute_tensor(gradient, mesh, {Shard(0)}, kNoSource);
  plain.mutable_grad() = gradient;
  const auto before = ours._version();
  FusedAdamW({ours}, {.lr = 0.1}).step();
  FusedAdamW({plain}, {.lr = 0.1}).step();
  CHECK(ours._version() > before);
  const at::Tensor result = full_tensor(ours.detach());
  if (mesh.is_member()) CHECK(close(result, plain.detach()));
}

TESSERA_RANKS_TEST_CASE("FusedAdamW refuses what it cannot update", {1, 2}) {
  const at::Tensor columns = at::zeros({4, 4}, on(at::kDouble)).slice(1, 0, 2).requires_grad_();
  check_refused([&] { FusedAdamW({columns}); }, "the memory of parameter 0, of strides [4, 1], has gaps or overlaps");
  const at::Tensor x = leaf(sample({3}));
  check_refused([&] { FusedAdamW({x, x}); }, "parameter 1 is listed twice; list it once");
  check_refused([&] { FusedAdamW({at::Tensor()}); }, "parameter 0 is undefined");
  check_refused([&] { FusedAdamW({x * 2}); }, "parameter 0 is the result of an operator; give a leaf");
  check_refused([&] { FusedAdamW({x}, {.lr = -1}); }, "lr is -1; give a number of 0 or more");
  check_refused([&] { FusedAdamW({x}, {.beta2 = 1}); }, "beta2 is 1; give a number from 0 to less than 1");
  FusedAdamW good({x});
  check_refused([&] { good.set_lr(-0.5); }, "lr is -0.5");
}
