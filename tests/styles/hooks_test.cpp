#include <future>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <doctest/doctest.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "tessera/mesh/device_mesh.h"
#include "tessera/styles/clone.h"
#include "tessera/styles/hooks.h"

namespace {

struct DoubleImpl : torch::nn::Cloneable<DoubleImpl> {
  explicit DoubleImpl(double by = 2) : factor(by) { reset(); }
  void reset() override {}
  at::Tensor forward(const at::Tensor& x) { return x * factor; }
  double factor;
};
TESSERA_MODULE(Double);

struct ScaleImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x, int64_t by, std::optional<at::Tensor> shift = std::nullopt,
                     const at::Tensor& mask = {}) {
    x = x * by;
    if (shift) x = x + *shift;
    return mask.defined() ? x * mask : x;
  }

 protected:
  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(std::optional<at::Tensor>())},
                           {3, torch::nn::AnyValue(at::Tensor())})
};
TESSERA_MODULE(Scale);

struct SplitImpl : torch::nn::Module {
  std::tuple<at::Tensor, int64_t, std::vector<at::Tensor>> forward(const std::vector<at::Tensor>& xs) const {
    return {xs.at(0), 7, {xs.at(1), xs.at(0) + xs.at(1)}};
  }
};
TESSERA_MODULE(Split);

struct TwinsImpl : torch::nn::Module {
  std::pair<at::Tensor, at::Tensor> forward(const std::pair<at::Tensor, int64_t>& x) { return {x.first, x.first * 2}; }
};
TESSERA_MODULE(Twins);

using TwoTensors = std::tuple<at::Tensor, at::Tensor>;
using DeepTensor = std::tuple<int64_t, std::tuple<at::Tensor>>;

// Takes tuples before, between and after tensors, and returns all tensors in their order.
struct TuplesImpl : torch::nn::Module {
  std::vector<at::Tensor> forward(const TwoTensors& first, const at::Tensor& second, TwoTensors third,
                                  const std::tuple<int64_t, double>& other, at::Tensor fourth,
                                  const DeepTensor& fifth) {
    last_other = &other;
    return {std::get<0>(first),
            std::get<1>(first),
            second,
            std::get<0>(third),
            std::get<1>(third),
            fourth,
            std::get<0>(std::get<1>(fifth))};
  }
  const void* last_other = nullptr;
};
TESSERA_MODULE(Tuples);

// Writes a state of the caller's.
struct RecurrentImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, TwoTensors& state) {
    state = {std::get<0>(state) + x, std::get<1>(state) * x};
    return std::get<0>(state) + std::get<1>(state);
  }
};
TESSERA_MODULE(Recurrent);

struct TupleFirstImpl : torch::nn::Module {
  at::Tensor forward(const TwoTensors& pair, const at::Tensor& last, double by = 1) {
    return (std::get<0>(pair) * 100 + std::get<1>(pair) * 10 + last) * by;
  }
};
TESSERA_MODULE(TupleFirst);

struct NestedImpl : torch::nn::Cloneable<NestedImpl> {
  NestedImpl() { reset(); }
  void reset() override { inner = register_module("inner", Double(3)); }
  at::Tensor forward(const at::Tensor& x) { return inner(x); }
  Double inner{nullptr};
};
TESSERA_MODULE(Nested);

struct NothingImpl : torch::nn::Module {
  void forward(at::Tensor x) { seen = x; }
  at::Tensor seen;
};
TESSERA_MODULE(Nothing);

double value(const at::Tensor& t) { return t.sum().item<double>(); }

void add_one(std::vector<at::Tensor>& inputs) {
  for (at::Tensor& t : inputs) {
    if (t.defined()) t = t + 1;
  }
}

at::Tensor number(double v) { return at::full({1}, v); }

}  // namespace

TEST_CASE("a hooked module runs its hooks by m(x), m->forward(x), Sequential and AnyModule alike") {
  Double m(10);
  m->register_forward_pre_hook(add_one);
  m->register_forward_hook([](const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs) {
    CHECK(value(inputs.at(0)) == 2);  // the pre-hook's value
    outputs.at(0) = outputs.at(0) + 0.5;
  });
  const at::Tensor x = number(1);
  CHECK(value(m(x)) == 20.5);
  CHECK(value(m->forward(x)) == 20.5);
  torch::nn::Sequential sequence(m, Double(2));
  CHECK(value(sequence->forward(x)) == 41);
  torch::nn::AnyModule any(m);
  CHECK(value(any.forward(x)) == 20.5);
  CHECK(value(x) == 1);  // the caller's tensor is not changed
  CHECK(m->name() == "tessera::Hooked<(anonymous namespace)::DoubleImpl>");
}

TEST_CASE("without hooks a hooked module is what it was, and constructs as it did") {
  CHECK(value(Double(4)->forward(number(2))) == 8);
  CHECK(value(Double()(number(2))) == 4);
  Double shared(std::make_shared<tessera::Hooked<DoubleImpl>>(5.0));
  CHECK(shared->factor == 5);
}

TEST_CASE("default arguments: of m(...) and of Sequential") {
  Scale m;
  std::vector<std::size_t> counts;
  m->register_forward_pre_hook([&](std::vector<at::Tensor>& inputs) {
    counts.push_back(inputs.size());
    inputs.at(0) = inputs.at(0) + 1;
  });
  CHECK(value(m(number(1), 3)) == 6);
  CHECK(value(m(number(1), 3, number(10))) == 16);
  CHECK(value(m->forward(number(1), 3, std::nullopt, number(2))) == 12);
  torch::nn::AnyModule any(m);
  CHECK(value(any.forward(number(1), int64_t{3})) == 6);
  // The hook sees the tensors among the given arguments; absent ones are undefined.
  CHECK(counts == std::vector<std::size_t>{1, 2, 3, 3});
}

TEST_CASE("hooks see tensors in vectors and tuples, in order, and replace them") {
  Split m;
  m->register_forward_pre_hook(add_one);
  m->register_forward_hook([](const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs) {
    CHECK(inputs.size() == 2);
    CHECK(outputs.size() == 3);
    outputs[2] = outputs[2] * 100;
  });
  const auto [first, seven, rest] = m->forward({number(1), number(2)});
  CHECK(value(first) == 2);
  CHECK(seven == 7);
  CHECK(value(rest.at(0)) == 3);
  CHECK(value(rest.at(1)) == 500);
}

TEST_CASE("hooks see tensors in pairs, and replace them") {
  Twins m;
  m->register_forward_pre_hook(add_one);
  m->register_forward_hook([](const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs) {
    CHECK(inputs.size() == 1);
    REQUIRE(outputs.size() == 2);
    outputs[1] = outputs[1] * 100;
  });
  const auto [first, second] = m(std::pair(number(1), int64_t{5}));
  CHECK(value(first) == 2);
  CHECK(value(second) == 400);
}

TEST_CASE("tuples among the arguments: each tensor that a hook sees goes back to its place, and the caller's stay") {
  Tuples m;
  m->register_forward_pre_hook([](std::vector<at::Tensor>& inputs) {
    CHECK(inputs.size() == 7);
    for (at::Tensor& t : inputs) t = t * 10;
  });
  const TwoTensors first(number(1), number(2));
  TwoTensors third(number(4), number(5));
  const std::tuple<int64_t, double> other(8, 0.5);
  DeepTensor fifth(9, std::tuple(number(7)));
  for (const std::vector<at::Tensor>& got : {m->forward(first, number(3), third, other, number(6), fifth),
                                             m(first, number(3), third, other, number(6), fifth)}) {
    REQUIRE(got.size() == 7);
    for (std::size_t i = 0; i < got.size(); ++i) CHECK(value(got[i]) == 10 * static_cast<double>(i + 1));
  }
  CHECK(m->last_other == static_cast<const void*>(&other));  // a tuple without tensors is not copied
  CHECK(value(std::get<0>(first)) == 1);
  CHECK(value(std::get<1>(first)) == 2);
  CHECK(value(std::get<0>(third)) == 4);
  CHECK(value(std::get<1>(third)) == 5);
  CHECK(value(std::get<0>(std::get<1>(fifth))) == 7);
}

TEST_CASE("a state that forward takes by reference stays the caller's, with what a hook has made of it") {
  Recurrent m;
  m->register_forward_pre_hook([](std::vector<at::Tensor>& inputs) {
    REQUIRE(inputs.size() == 3);
    for (at::Tensor& t : inputs) t = t * 10;
  });
  TwoTensors state(number(2), number(3));
  CHECK(value(m->forward(number(1), state)) == (20 + 10) + 30 * 10);
  CHECK(value(std::get<0>(state)) == 30);
  CHECK(value(std::get<1>(state)) == 300);
}

TEST_CASE("tuples among the arguments of a call without those that have defaults") {
  TupleFirst m;
  m->register_forward_pre_hook(add_one);
  TwoTensors pair(number(1), number(2));
  CHECK(value(m(pair, number(3))) == 234);
  CHECK(value(m(std::as_const(pair), number(3), 2)) == 468);
  CHECK(value(m(TwoTensors(number(1), number(2)), number(3))) == 234);
  CHECK(value(std::get<0>(pair)) == 1);
  CHECK(value(std::get<1>(pair)) == 2);
}

TEST_CASE("a forward that returns nothing has hooks too") {
  Nothing m;
  m->register_forward_pre_hook(add_one);
  std::size_t outputs_seen = 9;
  m->register_forward_hook(
      [&](const std::vector<at::Tensor>&, std::vector<at::Tensor>& outputs) { outputs_seen = outputs.size(); });
  m->forward(number(1));
  CHECK(value(m->seen) == 2);
  CHECK(outputs_seen == 0);
}

TEST_CASE("hooks are removed by their number") {
  Double m(10);
  const int64_t first = m->register_forward_pre_hook(add_one);
  const int64_t second = m->register_forward_pre_hook(add_one);
  CHECK(value(m(number(1))) == 30);
  m->remove_hook(first);
  CHECK(value(m(number(1))) == 20);
  m->remove_hook(second);
  CHECK(m->hooks() == 0);
  CHECK_THROWS_WITH_AS(
      m->remove_hook(second),
      "remove_hook: there is no hook 1; give a number that register_forward_pre_hook or register_forward_hook "
      "returned",
      std::invalid_argument);
}

TEST_CASE("a hook may remove itself and add others, which the next call runs") {
  Double m(10);
  int64_t own = -1;
  own = m->register_forward_pre_hook([&](std::vector<at::Tensor>& inputs) {
    m->remove_hook(own);
    for (int i = 0; i < 8; ++i) m->register_forward_pre_hook(add_one);
    add_one(inputs);
  });
  m->register_forward_pre_hook(add_one);
  CHECK(value(m(number(1))) == 30);
  CHECK(value(m(number(1))) == 100);
}

TEST_CASE("a hook keeps its state from call to call, and that of a clone has its own") {
  Double m(10);
  m->register_forward_pre_hook(
      [calls = 0](std::vector<at::Tensor>& inputs) mutable { inputs[0] = inputs[0] + calls++; });
  CHECK(value(m(number(1))) == 10);
  CHECK(value(m(number(1))) == 20);
  Double copy(std::dynamic_pointer_cast<Double::Impl>(m->clone()));
  CHECK(value(copy(number(1))) == 30);
  CHECK(value(m(number(1))) == 30);
}

TEST_CASE("a hook that changes the number of tensors is refused") {
  Double m;
  m->register_forward_pre_hook([](std::vector<at::Tensor>& inputs) { inputs.clear(); });
  CHECK_THROWS_WITH_AS(
      m(number(1)),
      "hook of the root module: it was given 1 tensors among forward's arguments and left 0; replace tensors, but "
      "keep their number",
      std::invalid_argument);
}

TEST_CASE("clone: the root's hooks by clone(), those below by clone_module") {
  Nested m;
  m->register_forward_pre_hook(add_one);
  m->inner->register_forward_pre_hook(add_one);
  CHECK(value(m(number(1))) == 9);
  const auto cloned = std::dynamic_pointer_cast<tessera::Hooked<NestedImpl>>(m->clone());
  REQUIRE(cloned != nullptr);
  CHECK(value(cloned->forward(number(1))) == 6);
  const auto whole = std::dynamic_pointer_cast<tessera::Hooked<NestedImpl>>(tessera::clone_module(*m));
  REQUIRE(whole != nullptr);
  CHECK(value(whole->forward(number(1))) == 9);
}

TEST_CASE("forwards on two threads are each charged to their own module") {
  const auto world = tessera::World::fake(0, 2);
  Double first, second;
  first->set_place("first", world);
  second->set_place("second", world);
  std::string in_first, in_second;
  std::promise<void> second_began, first_ended;
  second->register_forward_pre_hook([&](std::vector<at::Tensor>&) {
    second_began.set_value();
    first_ended.get_future().wait();
    in_second = world->current_path();
  });
  std::thread other;
  first->register_forward_pre_hook([&](std::vector<at::Tensor>&) {
    other = std::thread([&] { second(number(1)); });
    second_began.get_future().wait();
    in_first = world->current_path();
  });
  first(number(1));
  CHECK(world->current_path() == "-");
  first_ended.set_value();
  other.join();
  CHECK(in_first == "first");
  CHECK(in_second == "second");
  CHECK(world->current_path() == "-");
}

TEST_CASE("collectives inside forward are charged to the innermost hooked module") {
  const auto world = tessera::World::fake(0, 2);
  Nested m;
  m->set_place("outer", world);
  m->inner->set_place("outer.inner", world);
  std::vector<std::string> paths;
  m->register_forward_pre_hook([&](std::vector<at::Tensor>&) { paths.push_back(world->current_path()); });
  m->inner->register_forward_pre_hook([&](std::vector<at::Tensor>&) { paths.push_back(world->current_path()); });
  m->register_forward_hook(
      [&](const std::vector<at::Tensor>&, std::vector<at::Tensor>&) { paths.push_back(world->current_path()); });
  m(number(1));
  CHECK(paths == std::vector<std::string>{"outer", "outer.inner", "outer"});
  CHECK(world->current_path() == "-");
}
