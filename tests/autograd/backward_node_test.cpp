// Tests detail::record, by which functions of ours enter autograd's graph.

#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/dtensor/backward_node.h"
#include "tessera/tests/dtensor/forward_level.h"
#include "tessera/tests/dtensor/values.h"

namespace tessera::testing {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// Is the formula of x * y + bias, which saves both factors.
struct Product {
  static constexpr const char* kName = "product";
  variable_list operator()(const Node& node, const variable_list& saved, const variable_list& gradients) const {
    variable_list out(3);
    if (node.task_should_compute_output(0)) out[0] = gradients[0] * saved[1];
    if (node.task_should_compute_output(1)) out[1] = gradients[0] * saved[0];
    if (node.task_should_compute_output(2)) out[2] = gradients[0];
    return out;
  }
};

at::Tensor product(const at::Tensor& x, const at::Tensor& y, const at::Tensor& bias = {}) {
  return detail::record({x, y, bias}, {x, y}, Product(), [&] {
    CHECK_FALSE(c10::GradMode::is_enabled());
    return bias.defined() ? x * y + bias : x * y;
  });
}

// Is the formula of {2 x, 3 x, the places of the largest}; it notes which gradients it was given.
struct Multiples {
  static constexpr const char* kName = "multiples";
  std::string* given;
  variable_list operator()(const Node& /*node*/, const variable_list& saved, const variable_list& gradients) const {
    CHECK(saved.empty());
    for (const at::Tensor& g : gradients) *given += g.defined() ? 'g' : '-';
    at::Tensor out;
    for (std::size_t i = 0; i < 2; ++i) {
      if (!gradients[i].defined()) continue;
      const at::Tensor term = gradients[i] * (2.0 + static_cast<double>(i));
      out = out.defined() ? out + term : term;
    }
    return {out};
  }
};

std::vector<at::Tensor> multiples(const at::Tensor& x, std::string& given) {
  return detail::record({x}, {}, Multiples{&given}, [&] { return std::vector<at::Tensor>{x * 2, x * 3, x.argmax(0)}; });
}

}  // namespace

TEST_CASE("record: gradients, gradients of gradients, and an input that is not there") {
  const at::Tensor x = leaf(sample({3, 2})), y = leaf(sample({3, 2}, 1)), bias = leaf(sample({3, 2}, 2));
  for (const at::Tensor& b : {at::Tensor(), bias}) {
    const at::Tensor z = product(x, y, b);
    CHECK(z.requires_grad());
    CHECK(z.grad_fn()->name() == "product");
    const auto first = torch::autograd::grad({z.square().sum()}, {x, y}, {}, true, /*create_graph=*/true);
    const at::Tensor plain = b.defined() ? x * y + b : x * y;
    const auto want = torch::autograd::grad({plain.square().sum()}, {x, y}, {}, true, /*create_graph=*/true);
    for (std::size_t i = 0; i < 2; ++i) CHECK(same(first[i], want[i]));
    const auto second = torch::autograd::grad({first[0].sum()}, {x, y});
    const auto want_second = torch::autograd::grad({want[0].sum()}, {x, y});
    for (std::size_t i = 0; i < 2; ++i) CHECK(close(second[i], want_second[i]));
  }
  product(x.detach(), y, bias).sum().backward();
  CHECK_FALSE(x.grad().defined());
  CHECK(same(y.grad(), x.detach()));
  CHECK(same(bias.grad(), at::ones_like(bias)));
}

TEST_CASE("record: nothing is recorded without an input that requires a gradient, or without gradient mode") {
  const at::Tensor x = sample({3}), y = leaf(sample({3}, 1));
  CHECK_FALSE(product(x, x).requires_grad());
  const at::NoGradGuard no_grad;
  CHECK_FALSE(product(x, y).requires_grad());
}

TEST_CASE("record: what was saved is checked, and freed after backward") {
  const at::Tensor x = leaf(sample({3})), y = leaf(sample({3}, 1));
  at::Tensor z = product(x, y);
  z.sum().backward({}, /*keep_graph=*/true);
  z.sum().backward();
  CHECK(same(x.grad(), 2 * y.detach()));
  CHECK_THROWS_WITH(z.sum().backward(), doctest::Contains("backward through the graph a second time"));
  z = product(x, y);
  {
    const at::NoGradGuard no_grad;
    y.add_(1);
  }
  CHECK_THROWS_WITH(z.sum().backward(), doctest::Contains("modified by an inplace operation"));
}

TEST_CASE("record: several results, of which some took no part or have no gradients") {
  const at::Tensor x = leaf(sample({3}));
  std::string given;
  std::vector<at::Tensor> made = multiples(x, given);
  CHECK_FALSE(made[2].requires_grad());
  made[1].sum().backward({}, /*keep_graph=*/true);
  CHECK(given == "-g-");
  CHECK(same(x.grad(), at::full_like(x, 3)));
  (made[0] + made[1]).sum().backward();
  CHECK(given == "-g-gg-");
  CHECK(same(x.grad(), at::full_like(x, 8)));
}

TEST_CASE("record: a gradient that is missing stays missing, and a tangent is refused") {
  // Returns its input, and no gradient.
  struct Blind : torch::autograd::Function<Blind> {
    static at::Tensor forward(torch::autograd::AutogradContext* /*ctx*/, const at::Tensor& x) { return x.clone(); }
    static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* /*ctx*/,
                                                 const torch::autograd::tensor_list& /*grads*/) {
      return {at::Tensor()};
    }
  };
  const at::Tensor x = leaf(sample({3})), y = leaf(sample({3}, 1));
  Blind::apply(product(x, y)).sum().backward();
  CHECK_FALSE(x.grad().defined());
  const ForwardLevel level;
  CHECK_THROWS_WITH_AS(product(dual(x, y), y), "product: an input has a tangent", std::logic_error);
}

TEST_CASE("record: a result may be written in place") {
  const at::Tensor x = leaf(sample({3})), y = leaf(sample({3}, 1));
  at::Tensor z = product(x, y);
  z.mul_(5);
  z.sum().backward();
  CHECK(close(x.grad(), 5 * y.detach()));
}

}  // namespace tessera::testing
