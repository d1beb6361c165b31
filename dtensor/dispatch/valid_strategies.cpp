#include "tessera/dtensor/dispatch/valid_strategies.h"

#include <algorithm>
#include <optional>
#include <string_view>

namespace tessera::dispatch {
namespace {

using rules::OpRule;
using rules::Strategy;
using rules::TensorInfo;

// LibTorch refuses inputs of different sizes, but on some ranks their pieces may fit each other, or have no elements.
// Rules with halos or `valid` know of such sizes themselves, and a user's operator may take them.
void run_misfits_whole(OpRule& rule, std::span<const TensorInfo> inputs) {
  if (rule.halos || rule.valid) return;
  const auto cuts_different_sizes = [&](const Strategy& strategy) {
    std::optional<int64_t> size;
    for (std::size_t j = 0; j < inputs.size(); ++j) {
      const Placement& p = strategy.inputs.at(j);
      if (!inputs[j].defined || !p.is_shard()) continue;
      if (p.tensor_dim() >= inputs[j].ndim()) return true;
      const int64_t mine = inputs[j].sizes[static_cast<std::size_t>(p.tensor_dim())];
      if (mine != size.value_or(mine)) return true;
      size = mine;
    }
    return false;
  };
  if (std::ranges::any_of(rule.strategies, cuts_different_sizes)) rule.strategies.clear();
}

void keep_numbers_whole(OpRule& rule, const Call& call, std::span<const std::size_t> tensors) {
  std::erase_if(rule.strategies, [&](const Strategy& strategy) {
    for (std::size_t j = 0; j < tensors.size(); ++j) {
      const TensorArg& entry = call.tensors[tensors[j]];
      if (entry.spec == nullptr && entry.tensor->defined() && !strategy.inputs.at(j).is_replicate()) return true;
    }
    return false;
  });
}

// Where terms would not add up, they are reduced first.
void keep_terms_finite(OpRule& rule, const Call& call) {
  if (!has_zero_or_nonfinite_number(call)) return;
  std::erase_if(rule.strategies, [&](const Strategy& strategy) {
    return std::ranges::any_of(strategy.inputs, [](const Placement& p) { return p.is_partial(); });
  });
}

// An operator's own kernel draws the same numbers on every rank, which would be those of other elements on each.
void keep_draws_whole(OpRule& rule, const Call& call) {
  if (!draws(call) || !rule.kernel.empty()) return;
  std::erase_if(rule.strategies, [](const Strategy& strategy) { return strategy.kernel.empty(); });
  if (rule.keep_kernel.empty()) rule.outputs_for = nullptr;
}

}  // namespace

bool names_missing_dim(const rules::OpCall& call) {
  if (call.inputs.empty() || !call.inputs[0].defined) return false;
  const int64_t ndim = std::max<int64_t>(call.inputs[0].ndim(), 1);
  const auto misses = [ndim](int64_t dim) { return dim < -ndim || dim >= ndim; };
  for (const std::string_view name : {"dim", "dims"}) {
    if (!call.has_arg(name)) continue;
    const at::IValue& given = call.arg(name);
    if (given.isInt() && misses(given.toInt())) return true;
    if (given.isIntList() && std::ranges::any_of(given.toIntVector(), misses)) return true;
  }
  return false;
}

void drop_invalid_strategies(OpRule& rule, const Call& call, std::span<const std::size_t> tensors,
                             std::span<const TensorInfo> inputs, bool checked) {
  if (!checked && call.traits.is_of_libtorch()) run_misfits_whole(rule, inputs);
  keep_numbers_whole(rule, call, tensors);
  keep_terms_finite(rule, call);
  keep_draws_whole(rule, call);
}

}  // namespace tessera::dispatch
