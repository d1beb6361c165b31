#pragma once

#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn.h>

namespace tessera::testing {

using Tensors = std::vector<at::Tensor>;

// One input of a module.
struct Input {
  enum class As {
    kSpread,  // has the layout of the table's column
    kWhole,   // a replicated DTensor
    kPlain,   // a plain tensor, the same on every rank
  };
  Input(at::Tensor tensor, As how = As::kSpread)  // NOLINT: a row lists tensors
      : value(std::move(tensor)), as(how), grad(value.is_floating_point()) {}
  at::Tensor value;
  As as;
  bool grad;
};

// A module and the call of it.
struct Subject {
  std::shared_ptr<torch::nn::Module> module;
  std::function<Tensors(const Tensors& inputs)> run;
  std::vector<Input> inputs;
};

struct ModuleRow {
  std::string name;
  std::function<Subject()> make;
  bool eval = false;
  bool draws = false;  // compared with one rank of the same seed, not with plain tensors
  // The module itself draws plain tensors from LibTorch's generator, which ranks that are threads share: they differ.
  bool draws_plain = false;
};

inline ModuleRow in_eval(ModuleRow row) {
  row.eval = true;
  row.name += " eval";
  return row;
}
inline ModuleRow drawing(ModuleRow row) {
  row.draws = true;
  row.name += " drawing";
  return row;
}

inline ModuleRow drawing_plain(ModuleRow row) {
  row.draws_plain = true;
  return drawing(std::move(row));
}

// Returns different numbers between -1 and 1, the same on every rank.
at::Tensor waves(at::IntArrayRef sizes, double seed = 1);
// Returns numbers between 0 and 1.
at::Tensor shares(at::IntArrayRef sizes, double seed = 1);
// Returns whole numbers from 0 on, below `below`.
at::Tensor indices(at::IntArrayRef sizes, int64_t below);
// Returns numbers that are -1 or 1.
at::Tensor signs(at::IntArrayRef sizes);
Input plain(at::Tensor value);
Input whole_input(at::Tensor value);
Input without_grad(Input input);

inline Tensors as_tensors(const at::Tensor& t) { return {t}; }
inline Tensors as_tensors(const Tensors& t) { return t; }
template <class... T>
Tensors as_tensors(const std::tuple<T...>& t) {
  Tensors out;
  const auto add = [&](const auto& each) {
    for (const at::Tensor& tensor : as_tensors(each)) out.push_back(tensor);
  };
  std::apply([&](const auto&... each) { (add(each), ...); }, t);
  return out;
}

template <class Module>
Tensors forward(Module& m, const Tensors& t) {
  if constexpr (requires { m->forward(t[0], t[0], t[0], t[0]); }) {
    if (t.size() == 4) return as_tensors(m->forward(t[0], t[1], t[2], t[3]));
  }
  if constexpr (requires { m->forward(t[0], t[0], t[0]); }) {
    if (t.size() == 3) return as_tensors(m->forward(t[0], t[1], t[2]));
  }
  if constexpr (requires { m->forward(t[0], t[0]); }) {
    if (t.size() == 2) return as_tensors(m->forward(t[0], t[1]));
  }
  if constexpr (requires { m->forward(t[0]); }) {
    if (t.size() == 1) return as_tensors(m->forward(t[0]));
  }
  throw std::logic_error("a row with so many inputs that the module does not take");
}

template <class Module, class Call>
Subject subject(Module made, std::vector<Input> inputs, Call call) {
  return {.module = made.ptr(),
          .run = [made, call](const Tensors& t) mutable { return as_tensors(call(made, t)); },
          .inputs = std::move(inputs)};
}

std::vector<ModuleRow> layer_rows();
std::vector<ModuleRow> pooling_rows();
std::vector<ModuleRow> recurrent_rows();
std::vector<ModuleRow> attention_rows();
std::vector<ModuleRow> norm_rows();
std::vector<ModuleRow> activation_rows();
std::vector<ModuleRow> loss_rows();

}  // namespace tessera::testing

// Makes a row of a module as users write it, and its inputs.
#define MODULE(made, ...)                                                                                               \
  ::tessera::testing::ModuleRow {                                                                                       \
#made, [] {                                                                                                           \
      return ::tessera::testing::subject(                                                                               \
          made, {__VA_ARGS__}, [](auto& m, const ::tessera::testing::Tensors& t) { return forward(m, t); });            \
    } \
  }
// Makes a row with a call of its own, of `m` on inputs `t`.
#define MODULE_BY(made, call, ...)                                                                                            \
  ::tessera::testing::ModuleRow {                                                                                             \
#made ": " #call, [] {                                                                                                      \
      return ::tessera::testing::subject(made, {__VA_ARGS__},                                                                 \
                                         [](auto& m, const ::tessera::testing::Tensors& t) { return call; });                 \
    } \
  }
