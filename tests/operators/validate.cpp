#include "tessera/tests/operators/validate.h"

#include <algorithm>
#include <map>
#include <string>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/tests/harness/device.h"

namespace tessera::testing {
namespace {

using Tensors = std::vector<at::Tensor>;

// Holds what a call is expected to leave.
struct Expected {
  Tensors results;
  Tensors written;  // [tensor]: those that the call writes
};

// Eigenvectors (columns) are defined up to a factor of modulus 1. Returns them with the factors that bring them nearest
// to `whole`.
at::Tensor in_phase(const at::Tensor& vectors, const at::Tensor& whole) {
  const at::Tensor factors = (vectors.conj() * whole).sum(-2, /*keepdim=*/true);
  return vectors * factors / factors.abs();
}

bool are_eigenvectors(const WholeCall& call, const at::Tensor& whole) {
  return call.schema().name() == "aten::linalg_eig" && whole.dim() == call.tensors()[0].dim();
}

// Says whether LibTorch's kernel for a GPU leaves this result's memory as it was.
bool is_unwritten(const WholeCall& call, std::size_t result) {
  constexpr int64_t kNoReduction = 0;
  return !device().is_cpu() && call.schema().name() == "aten::nll_loss2d_forward" && result == 1 &&
         call.args()[3].toInt() == kNoReduction;
}

// Says whether a result belongs to the kernel that was picked: all but the first one, where statistics are given.
bool is_kernels_own(const WholeCall& call, std::size_t result) {
  constexpr std::size_t kTraining = 5;
  return !device().is_cpu() && call.schema().name() == "aten::_batch_norm_impl_index" && result > 0 &&
         !call.args()[kTraining].toBool();
}

// Says whether a result may be no DTensor: it is made of sizes alone, is memory of a kernel's own, or wraps a DTensor.
bool may_be_plain(const WholeCall& call, std::size_t result) {
  static const std::map<std::string, std::size_t> first_plain = {
      {"aten::_add_batch_dim", 0},        {"aten::_batch_norm_impl_index", 3}, {"aten::_batch_norm_with_update", 3},
      {"aten::_batch_norm_no_update", 3}, {"aten::_pack_padded_sequence", 1},  {"aten::_dim_arange", 0},
      {"aten::_pad_packed_sequence", 1},  {"aten::_shape_as_tensor", 0}};
  const auto found = first_plain.find(call.schema().name());
  return found != first_plain.end() && result >= found->second;
}

bool holds_tensors(const at::IValue& value) {
  if (!value.isList()) return value.isTensor();
  const auto items = value.toListRef();
  return std::any_of(items.begin(), items.end(), [](const at::IValue& item) { return item.isTensor(); });
}

// Says whether two numbers agree but for rounding, or are both not a number.
bool agree(double a, double b) { return std::abs(a - b) <= 1e-9 || a == b || (std::isnan(a) && std::isnan(b)); }

// Compares results that are no tensors: numbers, bools and lists of them.
std::string compare_rest(const WholeCall& call, const torch::jit::Stack& mine) {
  const torch::jit::Stack& whole = call.values();
  if (call.schema().name() == "aten::_batch_norm_impl_index") return {};  // the number of the kernel that was picked
  if (mine.size() != whole.size()) return fmt::format("{} results, not {}", mine.size(), whole.size());
  for (std::size_t i = 0; i < mine.size(); ++i) {
    const at::IValue& value = whole[i];
    if (holds_tensors(value)) continue;
    const bool same =
        value.isDouble() && mine[i].isDouble() ? agree(mine[i].toDouble(), value.toDouble()) : mine[i] == value;
    if (!same) return "another " + std::string(value.tagKind());
  }
  return {};
}

bool is_pending(const Placements& placements) {
  return std::any_of(placements.begin(), placements.end(), [](const Placement& p) { return p.is_partial(); });
}

// Returns `t` in float32 where an input of float32 is pending, as counts of steps of fused optimizers may be: its terms
// add up to it but for rounding.
at::Tensor as_exact_as_inputs(const WholeCall& call, const Trial& trial, const at::Tensor& t) {
  bool single = false;
  for (std::size_t j = 0; j < call.tensors().size(); ++j) {
    const at::Tensor& input = call.tensors()[j];
    single |= input.defined() && input.scalar_type() == at::kFloat && is_pending(trial.layouts[j]);
  }
  return single && t.defined() && t.scalar_type() == at::kDouble ? t.to(at::kFloat) : t;
}

std::string compare_result(const WholeCall& call, const Trial& trial, const at::Tensor& mine, const at::Tensor& whole,
                           bool values) {
  const bool phase =
      mine.defined() && whole.defined() && mine.sizes() == whole.sizes() && are_eigenvectors(call, whole);
  const at::Tensor full = mine.defined() && is_dtensor(mine) ? full_tensor(mine) : mine;
  const at::Tensor compared = phase ? in_phase(full, whole) : full;
  const std::string wrong = compare_tensor(compared, whole, /*values=*/false);
  if (!wrong.empty() || !values) return wrong;
  return compare_tensor(as_exact_as_inputs(call, trial, compared), as_exact_as_inputs(call, trial, whole));
}

// Runs the call on one rank and returns what is wrong.
std::string run_rank(const WholeCall& call, const Expected& expected, const Tensors& inputs, const Trial& trial,
                     bool values) {
  const torch::jit::Stack left = call.call(call.args_with(inputs));
  if (std::string wrong = compare_rest(call, left); !wrong.empty()) return wrong;
  const Tensors results = tensors_of(left);
  if (results.size() != expected.results.size())
    return fmt::format("{} tensors, not {}", results.size(), expected.results.size());
  const bool any_dtensor =
      std::ranges::any_of(inputs, [](const at::Tensor& t) { return t.defined() && is_dtensor(t); });
  for (std::size_t k = 0; k < results.size(); ++k) {
    const bool is_plain = any_dtensor && results[k].defined() && !is_dtensor(results[k]);
    if (is_plain && !may_be_plain(call, k)) return fmt::format("result {} is plain", k);
    if (is_kernels_own(call, k)) continue;
    const std::string wrong =
        compare_result(call, trial, results[k], expected.results[k], values && !is_unwritten(call, k));
    if (!wrong.empty()) return fmt::format("result {} {}", k, wrong);
  }
  for (std::size_t j = 0; j < inputs.size(); ++j) {
    if (!inputs[j].defined() || !call.writes(j)) continue;
    const bool same_sizes = inputs[j].sizes() == call.tensors()[j].sizes();  // not after squeeze_
    if (same_sizes && placements_of(inputs[j]) != trial.layouts[j])
      return fmt::format("written tensor {} has other placements", j);
    const std::string wrong = compare_result(call, trial, inputs[j], expected.written[j], values);
    if (!wrong.empty()) return fmt::format("written tensor {} {}", j, wrong);
  }
  return {};
}

Expected of_plain(const WholeCall& call) {
  Expected out{.results = call.results(), .written = {}};
  for (const at::Tensor& t : call.tensors()) out.written.push_back(t.defined() ? t.clone() : t);
  call.call(call.args_with(out.written));
  return out;
}

// Runs the call on DTensors on one rank, which draw the same numbers as on any number of ranks.
Finding draw_on_one_rank(const WholeCall& call, Expected& out) {
  const Trial trial = one_rank(call);
  const Placed placed(call.tensors(), trial);
  return on_ranks(trial, [&](const DeviceMesh& mesh, std::size_t rank) {
    const at::NoGradGuard no_grad;
    out.written = placed.on(mesh, rank);
    out.results = call.run(call.args_with(out.written));
    for (Tensors* const list : {&out.results, &out.written}) {
      for (at::Tensor& t : *list) {
        if (t.defined() && is_dtensor(t)) t = full_tensor(t).clone();
      }
    }
    for (std::size_t k = 0; k < out.results.size(); ++k) {
      if (k >= call.results().size())
        return fmt::format("{} tensors, not {}", out.results.size(), call.results().size());
      const std::string wrong = compare_tensor(out.results[k], call.results()[k], /*values=*/false);
      if (!wrong.empty()) return fmt::format("result {} {}", k, wrong);
    }
    return std::string();
  });
}

bool has_terms(const Trial& trial) { return std::any_of(trial.layouts.begin(), trial.layouts.end(), is_pending); }

}  // namespace

Comparable comparable(const WholeCall& call) {
  const std::string& name = call.schema().name();
  if (name.find("empty") != std::string::npos) return Comparable::kSizes;
  const bool bits = name == "aten::hash_tensor" || (call.schema().overload_name().starts_with("dtype") &&
                                                    (name == "aten::view" || name == "aten::view_copy"));
  if (bits) return Comparable::kUnrounded;
  return call.random() ? Comparable::kDrawn : Comparable::kValues;
}

Finding validate_layouts(const WholeCall& call, uint64_t seed) {
  const Comparable kind = comparable(call);
  Expected expected = of_plain(call);
  Finding worst;
  if (kind == Comparable::kDrawn) worst = draw_on_one_rank(call, expected);
  if (worst.verdict > Verdict::kReplicated) return worst;
  for (const Trial& trial : trials(call, seed)) {
    const bool values = kind != Comparable::kSizes && (kind != Comparable::kUnrounded || !has_terms(trial));
    const Placed placed(call.tensors(), trial);
    Finding found = on_ranks(trial, [&](const DeviceMesh& mesh, std::size_t rank) {
      const at::NoGradGuard no_grad;
      return run_rank(call, expected, placed.on(mesh, rank), trial, values);
    });
    if (found.verdict > worst.verdict) worst = std::move(found);
  }
  return worst;
}

}  // namespace tessera::testing
