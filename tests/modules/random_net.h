#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <torch/nn/module.h>

#include "tessera/tests/dtensor/random.h"

namespace tessera::testing {

// The sizes of what passes from one step of a net to the next: an image [batch, features, height, width], or a sequence
// [batch, height, features].
struct NetShape {
  bool image = false;
  int64_t batch = 1, features = 1, height = 1, width = 1;

  std::vector<int64_t> sizes() const {
    if (image) return {batch, features, height, width};
    return {batch, height, features};
  }
};

// A chain of random modules and operators, as users write them for one process. Nets of one seed are equal; parameters
// are float64.
struct RandomNetImpl : torch::nn::Module {
  explicit RandomNetImpl(unsigned seed);
  at::Tensor forward(at::Tensor x);

  // Adds a module, which `call` applies.
  template <class Module, class Call>
  void add(const std::string& what, Module made, Call call) {
    const std::string name = fmt::format("step{}", steps.size());
    Module module = register_module(name, std::move(made));
    text += fmt::format(" {}:{}", name, what);
    steps.emplace_back([module, call](const at::Tensor& x) mutable { return call(module, x); });
  }
  template <class Module>
  void add(const std::string& what, Module made) {
    add(what, std::move(made), [](Module& m, const at::Tensor& x) -> at::Tensor { return m(x); });
  }
  // Adds operators.
  void compute(const std::string& what, std::function<at::Tensor(const at::Tensor&)> call) {
    text += " " + what;
    steps.push_back(std::move(call));
  }

  NetShape input;
  std::string text;  // the steps, for messages
  std::vector<std::function<at::Tensor(const at::Tensor&)>> steps;
};
TORCH_MODULE(RandomNet);

}  // namespace tessera::testing
