// This file has the local kernel "draw", for random operators whose numbers depend on an element's position in the
// global tensor.

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <stdexcept>

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/tan.h>
#include <fmt/format.h>

#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/dtensor/random/draws.h"
#include "tessera/ops/rules/integer_range.h"
#include "tessera/ops/rules/rule.h"

namespace tessera {
namespace {

using torch::jit::Stack;

// Gives a call's arguments by name.
class Drawing {
 public:
  Drawing(const LocalCall& call, Stack& stack) : call_(call), stack_(stack) {}

  const at::IValue* find(const char* name) const {
    const auto at = call_.op.schema().argumentIndexWithName(name);
    return at ? &stack_[static_cast<std::size_t>(*at)] : nullptr;
  }
  double number(const char* name) const { return find(name)->toDouble(); }
  at::Tensor self() const { return stack_[0].toTensor(); }

  const Spec& spec() const { return *call_.outputs[0]; }
  detail::DrawKey key() const { return call_.draw; }
  rules::IntegerRange integers() const {
    return rules::integer_range(call_.op.schema(), {stack_.data(), stack_.size()}, spec().dtype);
  }

  // Returns the tensor to fill: the one that the operator writes, or else a new one.
  at::Tensor target() const {
    const auto& arguments = call_.op.schema().arguments();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite()) return stack_[i].toTensor();
    }
    const auto first = std::ranges::find_if(stack_, [](const at::IValue& value) { return value.isTensor(); });
    const at::Tensor like = first->toTensor();
    const at::TensorOptions options = like.options().dtype(spec().dtype);
    return like.sizes() == at::IntArrayRef(spec().local_sizes) ? at::empty_like(like, options)
                                                               : at::empty(spec().local_sizes, options);
  }
  void give(std::initializer_list<at::Tensor> results) {
    stack_.clear();
    for (const at::Tensor& t : results) stack_.emplace_back(t);
  }

 private:
  const LocalCall& call_;
  Stack& stack_;
};

using Draw = void (*)(const Drawing&, const at::Tensor& out);

void uniform(const Drawing& d, const at::Tensor& out) {
  draw_uniform(out, d.spec(), d.key(), d.number("from"), d.number("to"));
}

// LibTorch's normal refuses a negative deviation too. Only the rank that holds it sees it.
void check_deviations(const at::Tensor& std) {
  if (std.numel() == 0) return;
  const double least = std.min().item<double>();
  if (!(least >= 0)) {
    throw std::out_of_range(fmt::format("normal: {} is no standard deviation; give numbers of 0 or more", least));
  }
}

// Handles normal_(self, mean, std), and forms in which the mean, the deviation or both are tensors.
void normal(const Drawing& d, const at::Tensor& out) {
  const at::IValue& mean = *d.find("mean");
  const at::IValue& deviation = *d.find("std");
  if (mean.isDouble() && deviation.isDouble()) {
    draw_normal(out, d.spec(), d.key(), mean.toDouble(), deviation.toDouble());
    return;
  }
  if (deviation.isTensor()) check_deviations(deviation.toTensor());
  draw_normal(out, d.spec(), d.key(), 0, 1);
  deviation.isTensor() ? out.mul_(deviation.toTensor()) : out.mul_(deviation.toDouble());
  mean.isTensor() ? out.add_(mean.toTensor()) : out.add_(mean.toDouble());
}

void bernoulli(const Drawing& d, const at::Tensor& out) {
  const at::IValue* const p = d.find("p");
  if (p != nullptr && p->isDouble()) {
    draw_bernoulli(out, d.spec(), d.key(), p->toDouble());
  } else {
    draw_bernoulli(out, d.spec(), d.key(), p != nullptr ? p->toTensor() : d.self());
  }
}

void integers(const Drawing& d, const at::Tensor& out) {
  const rules::IntegerRange range = d.integers();
  draw_integers(out, d.spec(), d.key(), range.first, range.count);
}

void exponential(const Drawing& d, const at::Tensor& out) {
  draw_exponential(out, d.spec(), d.key(), d.number("lambd"));
}

// Makes numbers from others in double precision and converts them to the result's dtype.
template <class Make>
void by_doubles(const at::Tensor& out, const Make& make) {
  const at::Tensor numbers = at::empty(out.sizes(), out.options().dtype(at::kDouble));
  make(numbers);
  out.copy_(numbers);
}

void log_normal(const Drawing& d, const at::Tensor& out) {
  by_doubles(out, [&](const at::Tensor& x) {
    draw_normal(x, d.spec(), d.key(), d.number("mean"), d.number("std"));
    x.exp_();
  });
}

// The number of tries until one succeeds is an exponential time, rounded up.
void geometric(const Drawing& d, const at::Tensor& out) {
  by_doubles(out, [&](const at::Tensor& x) {
    draw_exponential(x, d.spec(), d.key(), -std::log1p(-d.number("p")));
    x.ceil_();
  });
}

// Uses the inverse of the distribution function.
void cauchy(const Drawing& d, const at::Tensor& out) {
  by_doubles(out, [&](const at::Tensor& x) {
    draw_uniform(x, d.spec(), d.key(), 0, 1);
    x.sub_(0.5).mul_(std::numbers::pi).tan_().mul_(d.number("sigma")).add_(d.number("median"));
  });
}

void unit_uniform(const Drawing& d, const at::Tensor& out) { draw_uniform(out, d.spec(), d.key(), 0, 1); }
void unit_normal(const Drawing& d, const at::Tensor& out) { draw_normal(out, d.spec(), d.key(), 0, 1); }

// The key is the operator's rule name.
const std::map<std::string, Draw, std::less<>> kDraws = {
    {"uniform", uniform},         {"normal", normal},          {"bernoulli", bernoulli},   {"random", integers},
    {"exponential", exponential}, {"log_normal", log_normal},  {"geometric", geometric},   {"cauchy", cauchy},
    {"rand_like", unit_uniform},  {"randn_like", unit_normal}, {"randint_like", integers},
};

// native_dropout(input, p, train) -> (result, mask). The elements that are kept are scaled up.
void dropout(Drawing& d) {
  const at::Tensor input = d.self();
  const at::IValue& train = *d.find("train");
  if (!train.isNone() && !train.toBool()) {
    d.give({input.clone(), at::ones_like(input, input.options().dtype(at::kBool))});
    return;
  }
  const detail::Dropped out = draw_dropout(input, d.spec(), d.key(), 1 - d.number("p"));
  d.give({out.result, out.mask});
}

void draw(const LocalCall& call, Stack& stack) {
  Drawing drawing(call, stack);
  const std::string key = rules::rule_key(call.op.schema().name());
  if (key == "native_dropout") {
    dropout(drawing);
    return;
  }
  const at::Tensor out = drawing.target();
  kDraws.at(key)(drawing, out);
  drawing.give({out});
}

[[maybe_unused]] const bool kRegistered = register_local_kernel("draw", draw, {.rearranges = true});

}  // namespace
}  // namespace tessera
