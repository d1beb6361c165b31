#include "tessera/tests/operators/validate.h"

#include <exception>
#include <mutex>
#include <random>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/dispatch/dispatcher.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/in_process.h"
#include "tessera/tests/ops_rules/pieces.h"

namespace tessera::testing {
namespace {

using Tensors = std::vector<at::Tensor>;

std::string innermost(const std::exception& error) {
  try {
    std::rethrow_if_nested(error);
  } catch (const std::exception& nested) {
    return innermost(nested);
  } catch (...) {
  }
  const std::string text = error.what();
  return text.substr(0, std::min<std::size_t>(text.find('\n'), 400));
}

at::Tensor whole_of(const at::Tensor& t) { return t.defined() && is_dtensor(t) ? full_tensor(t) : t; }

// Eigenvectors, in the columns, are defined up to a factor of modulus 1: with those that bring them nearest to `whole`.
at::Tensor in_phase(const at::Tensor& vectors, const at::Tensor& whole) {
  const at::Tensor factors = (vectors.conj() * whole).sum(-2, /*keepdim=*/true);
  return vectors * factors / factors.abs();
}

bool are_eigenvectors(const WholeCall& call, const at::Tensor& whole) {
  return call.schema().name() == "aten::linalg_eig" && whole.dim() == call.tensors()[0].dim();
}

std::string compare_tensor(const at::Tensor& mine, const at::Tensor& whole, const WholeCall& call) {
  if (mine.defined() != whole.defined()) return "is defined or not";
  if (!whole.defined()) return {};
  at::Tensor full = whole_of(mine);
  if (full.scalar_type() != whole.scalar_type()) {
    return fmt::format("is {}, not {}", c10::toString(full.scalar_type()), c10::toString(whole.scalar_type()));
  }
  if (full.sizes() != whole.sizes()) return "has other sizes";
  if (are_eigenvectors(call, whole)) full = in_phase(full, whole);
  return call.random() || same_values(full, whole) ? std::string() : "has other values";
}

// What is no tensor: numbers, truth values, lists of them.
std::string compare_rest(const torch::jit::Stack& mine, const torch::jit::Stack& whole) {
  if (mine.size() != whole.size()) return fmt::format("{} results, not {}", mine.size(), whole.size());
  for (std::size_t i = 0; i < mine.size(); ++i) {
    const at::IValue& value = whole[i];
    if (value.isBool() || value.isInt()) {
      if (mine[i] != value) return "another " + std::string(value.tagKind());
    } else if (value.isDouble() && std::abs(mine[i].toDouble() - value.toDouble()) > 1e-9) {
      return "another number";
    }
  }
  return {};
}

// One rank's part.
std::string run_rank(const WholeCall& call, const Tensors& written, const std::vector<Tensors>& pieces,
                     const std::vector<Placements>& layouts, const DeviceMesh& mesh, std::size_t rank) {
  const at::NoGradGuard no_grad;
  Tensors inputs;
  for (std::size_t j = 0; j < call.tensors().size(); ++j) {
    const at::Tensor& whole = call.tensors()[j];
    if (!whole.defined()) {
      inputs.push_back(whole);
      continue;
    }
    inputs.push_back(from_local(pieces[j][rank].contiguous(), mesh, layouts[j],
                                {.shape = whole.sizes().vec(), .stride = whole.contiguous().strides().vec()}));
  }
  const torch::jit::Stack values = call.call(call.args_with(inputs));
  if (std::string wrong = compare_rest(values, call.values()); !wrong.empty()) return wrong;
  const Tensors results = tensors_of(values);
  if (results.size() != call.results().size())
    return fmt::format("{} tensors, not {}", results.size(), call.results().size());
  for (std::size_t k = 0; k < results.size(); ++k) {
    const std::string wrong = compare_tensor(results[k], call.results()[k], call);
    if (!wrong.empty()) return fmt::format("result {} {}", k, wrong);
  }
  for (std::size_t j = 0; j < inputs.size(); ++j) {
    if (!inputs[j].defined() || !call.writes(j)) continue;
    const bool same_sizes = inputs[j].sizes() == call.tensors()[j].sizes();  // not after squeeze_
    if (same_sizes && placements_of(inputs[j]) != layouts[j])
      return fmt::format("written tensor {} has other placements", j);
    const std::string wrong = compare_tensor(inputs[j], written[j], call);
    if (!wrong.empty()) return fmt::format("written tensor {} {}", j, wrong);
  }
  return {};
}

std::string text_of(const std::vector<Placements>& layouts, const std::vector<int64_t>& mesh_shape) {
  std::string out = fmt::format("on {{{}}}:", fmt::join(mesh_shape, ", "));
  for (const Placements& p : layouts) out += ' ' + to_string(p);
  return out;
}

// What a plain call leaves in the tensors that it writes.
Tensors written_by(const WholeCall& call) {
  Tensors copies;
  for (const at::Tensor& t : call.tensors()) copies.push_back(t.defined() ? t.clone() : t);
  call.call(call.args_with(copies));
  return copies;
}

// Random numbers are not drawn into terms.
Placements candidates(const at::Tensor& t, bool written, bool random) {
  Placements out = {Replicate()};
  for (int64_t d = 0; d < t.dim(); ++d) out.push_back(Shard(d));
  if (t.dim() > 0 && !written) out.push_back(BlockCyclic(0, 1));
  if (written && random) return out;
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kAvg}) {
    if (can_be_partial(t.scalar_type(), op)) out.push_back(Partial(op));
  }
  return out;
}

}  // namespace

Finding validate(const WholeCall& call, const std::vector<Placements>& layouts, const std::vector<int64_t>& mesh_shape) {
  std::vector<Tensors> pieces;
  for (std::size_t j = 0; j < call.tensors().size(); ++j) {
    const at::Tensor& whole = call.tensors()[j];
    pieces.push_back(whole.defined() ? distribute(whole, layouts[j], mesh_shape) : Tensors());
  }
  const Tensors written = written_by(call);
  clear_dispatch_cache();
  const uint64_t before = dispatch_statistics().replicated;
  std::mutex mutex;
  Finding out;
  try {
    run_in_process(static_cast<int64_t>(num_ranks(mesh_shape)), [&](const std::shared_ptr<World>& world) {
      const DeviceMesh mesh = init_device_mesh("cpu", mesh_shape, {}, world);
      const std::string wrong = run_rank(call, written, pieces, layouts, mesh, static_cast<std::size_t>(world->rank()));
      const std::lock_guard lock(mutex);
      if (!wrong.empty()) out = {.verdict = Verdict::kWrong, .text = wrong};
    });
  } catch (const std::exception& error) {
    out = {.verdict = Verdict::kRefused, .text = innermost(error)};
  }
  if (out.verdict == Verdict::kByRule && dispatch_statistics().replicated != before) out.verdict = Verdict::kReplicated;
  if (out.verdict != Verdict::kByRule) out.text += "; " + text_of(layouts, mesh_shape);
  return out;
}

Finding validate_layouts(const WholeCall& call, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Placements> of_each;
  for (std::size_t j = 0; j < call.tensors().size(); ++j) {
    const at::Tensor& t = call.tensors()[j];
    of_each.push_back(t.defined() ? candidates(t, call.writes(j), call.random()) : Placements{Replicate()});
  }
  if (of_each.empty()) return {};
  Finding worst;
  const auto run = [&](const std::vector<Placements>& layouts, const std::vector<int64_t>& mesh_shape) {
    for (const Placements& p : layouts) {
      if (!partials_commute(p)) return;
    }
    Finding found = validate(call, layouts, mesh_shape);
    if (found.verdict > worst.verdict) worst = std::move(found);
  };
  const auto draw = [&](std::size_t j) { return of_each[j][random() % of_each[j].size()]; };
  for (const int64_t ranks : {2, 3}) {
    for (const Placement& first : of_each[0]) {
      std::vector<Placements> layouts;
      for (std::size_t j = 0; j < of_each.size(); ++j) layouts.push_back({j == 0 ? first : draw(j)});
      run(layouts, {ranks});
    }
  }
  for (const std::vector<int64_t>& mesh_shape : {std::vector<int64_t>{4}, {2, 2}, {2, 2}}) {
    std::vector<Placements> layouts(of_each.size());
    for (std::size_t j = 0; j < of_each.size(); ++j) {
      for (std::size_t i = 0; i < mesh_shape.size(); ++i) layouts[j].push_back(draw(j));
    }
    run(layouts, mesh_shape);
  }
  return worst;
}

}  // namespace tessera::testing
