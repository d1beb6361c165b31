#include "tessera/tests/operators/gradients.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/dtensor/dtensor.h"

namespace tessera::testing {
namespace {

bool has_derivative(const at::Tensor& t) {
  return t.defined() && (at::isFloatingType(t.scalar_type()) || at::isComplexType(t.scalar_type()));
}

at::Tensor drawn_like(const at::Tensor& t) {
  const at::ScalarType type = at::isComplexType(t.scalar_type()) ? at::kComplexDouble : at::kDouble;
  return at::randn(t.sizes(), type).to(t.device(), t.scalar_type());
}

// Returns the least precise dtype of the cotangents; no gradient is more precise.
at::ScalarType least_exact(const std::vector<at::Tensor>& cotangents) {
  at::ScalarType out = at::kDouble;
  for (const at::Tensor& t : cotangents) {
    const at::ScalarType type = c10::toRealValueType(t.scalar_type());
    if (c10::elementSize(type) < c10::elementSize(out)) out = type;
  }
  return out;
}

at::Tensor rounded(const at::Tensor& t, at::ScalarType type) {
  return t.to(t.is_complex() ? c10::toComplexType(type) : type);
}

// An undefined gradient counts as zero, since LibTorch may return either.
at::Tensor or_zeros(const at::Tensor& gradient, const at::Tensor& like) {
  return gradient.defined() ? gradient : at::zeros(like.sizes(), like.options());
}

}  // namespace

Gradients::Gradients(const WholeCall& call, uint64_t seed) : call_(call), seed_(seed), random_(seed) { choose(); }

void Gradients::choose() {
  const Tensors& tensors = call_.tensors();
  std::vector<bool> all(tensors.size());
  for (std::size_t j = 0; j < tensors.size(); ++j) all[j] = has_derivative(tensors[j]) && !call_.is_out(j);
  if (std::find(all.begin(), all.end(), true) == all.end()) return;
  for (const bool first_only : {false, true}) {
    if (attempt(all, first_only)) return;
    std::vector<bool> good(tensors.size());
    for (std::size_t j = 0; j < tensors.size(); ++j) {
      std::vector<bool> alone(tensors.size());
      alone[j] = true;
      good[j] = all[j] && attempt(alone, first_only);
    }
    if (attempt(good, first_only)) return;
    for (std::size_t j = 0; j < tensors.size(); ++j) {
      std::vector<bool> alone(tensors.size());
      alone[j] = good[j];
      if (attempt(alone, first_only)) return;
    }
  }
}

// Sets the members, or leaves `outputs_` empty if the gradients cannot be computed.
bool Gradients::attempt(const std::vector<bool>& wanted, bool first_only) {
  wanted_ = wanted;
  outputs_.clear();
  cotangents_.clear();
  gradients_.clear();
  Tensors leaves;
  for (std::size_t j = 0; j < wanted.size(); ++j) {
    const at::Tensor& t = call_.tensors()[j];
    leaves.push_back(t.defined() ? t.detach().clone().requires_grad_(wanted[j]) : t);
  }
  try {
    Tensors roots;
    for (const at::Tensor& t : forward(leaves)) roots.push_back(t);
    at::manual_seed(seed_);
    for (std::size_t k = 0; k < roots.size(); ++k) {
      const bool again = std::any_of(roots.begin(), roots.begin() + static_cast<std::ptrdiff_t>(k),
                                     [&](const at::Tensor& t) { return t.is_same(roots[k]); });
      if (again || !has_derivative(roots[k]) || !roots[k].requires_grad()) continue;
      outputs_.push_back(k);
      cotangents_.push_back(drawn_like(roots[k]));
      if (first_only) break;
    }
    if (outputs_.empty()) return false;
    const std::string wrong = differentiate(leaves, cotangents_, gradients_);
    const bool some =
        std::any_of(gradients_.begin(), gradients_.end(), [](const at::Tensor& t) { return t.defined(); });
    if (wrong.empty() && some) return true;
  } catch (const std::exception&) {
  }
  outputs_.clear();
  return false;
}

Gradients::Tensors Gradients::forward(const Tensors& leaves) const {
  Tensors used;
  for (std::size_t j = 0; j < leaves.size(); ++j) {
    used.push_back(wanted_[j] && call_.writes(j) ? leaves[j].clone() : leaves[j]);
  }
  Tensors out = call_.run(call_.args_with(used));
  for (std::size_t j = 0; j < used.size(); ++j) {
    if (call_.writes(j)) out.push_back(used[j]);
  }
  return out;
}

std::string Gradients::differentiate(const Tensors& leaves, const Tensors& cotangents, Tensors& gradients) const {
  const at::AutoGradMode enabled(true);
  const Tensors results = forward(leaves);
  Tensors roots;
  for (const std::size_t k : outputs_) {
    if (k >= results.size() || !results[k].defined() || !results[k].requires_grad())
      return fmt::format("result {} requires no gradient", k);
    roots.push_back(results[k]);
  }
  torch::autograd::backward(roots, cotangents);
  for (std::size_t j = 0; j < leaves.size(); ++j) gradients.push_back(wanted_[j] ? leaves[j].grad() : at::Tensor());
  return {};
}

Finding Gradients::validate(const Trial& trial, Tensors* reference) {
  Trial of_results{.layouts = {}, .mesh_shape = trial.mesh_shape};
  for (const at::Tensor& t : cotangents_) {
    const Placements options = candidates(t, /*written=*/false, /*random=*/false);
    Placements drawn;
    for (std::size_t i = 0; i < trial.mesh_shape.size(); ++i) drawn.push_back(options[random_() % options.size()]);
    if (!partials_commute(drawn)) drawn.assign(drawn.size(), Replicate());
    of_results.layouts.push_back(std::move(drawn));
  }
  const Placed placed(call_.tensors(), trial);
  const Placed weights(cotangents_, of_results);
  Finding out = on_ranks(trial, [&](const DeviceMesh& mesh, std::size_t rank) -> std::string {
    Tensors leaves = placed.on(mesh, rank);
    for (std::size_t j = 0; j < leaves.size(); ++j) {
      if (wanted_[j]) leaves[j].requires_grad_(true);
    }
    Tensors gradients;
    if (std::string wrong = differentiate(leaves, weights.on(mesh, rank), gradients); !wrong.empty()) return wrong;
    const at::NoGradGuard no_grad;
    for (std::size_t j = 0; j < leaves.size(); ++j) {
      if (!wanted_[j]) continue;
      const at::Tensor mine = or_zeros(gradients[j], call_.tensors()[j]);
      if (reference != nullptr) {
        (*reference)[j] = (is_dtensor(mine) ? full_tensor(mine) : mine).clone();
        continue;
      }
      const at::Tensor whole = or_zeros(gradients_[j], call_.tensors()[j]);
      const at::ScalarType type = least_exact(cotangents_);
      std::string wrong = compare_tensor(mine, whole, /*values=*/false);
      if (wrong.empty()) wrong = compare_tensor(rounded(mine, type), rounded(whole, type));
      if (!wrong.empty()) return fmt::format("gradient {} {}", j, wrong);
    }
    return {};
  });
  if (out.verdict > Verdict::kReplicated && !of_results.layouts.empty())
    out.text += ", gradients " + to_string(of_results);
  return out;
}

Finding Gradients::validate() {
  Finding worst;
  if (call_.random()) worst = validate(one_rank(call_), &gradients_);
  if (worst.verdict > Verdict::kReplicated) return worst;
  for (const Trial& trial : trials(call_, seed_)) {
    Finding found = validate(trial, nullptr);
    if (found.verdict > worst.verdict) worst = std::move(found);
  }
  return worst;
}

}  // namespace tessera::testing
