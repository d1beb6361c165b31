#include "tessera/tests/dtensor/op_check.h"

#include <algorithm>
#include <random>
#include <set>

#include <ATen/TensorOperators.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros_like.h>
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"

namespace tessera::testing {
namespace {

struct Outcome {
  Tensors results;
  Tensors gradients;  // one per input that has a gradient
};

// Returns a weight per element of a result, so that gradients differ from element to element.
at::Tensor weight_of(const at::Tensor& result, std::size_t index) {
  return sample(result.sizes(), static_cast<int64_t>(index) + 7).to(result.scalar_type());
}

Outcome run(const OpCase& c, Tensors inputs, const std::function<at::Tensor(const at::Tensor&)>& bring) {
  for (at::Tensor& t : inputs) {
    if (t.is_floating_point()) t.requires_grad_(true);
  }
  Outcome out;
  out.results = c.op(inputs);
  at::Tensor loss;
  for (std::size_t i = 0; i < out.results.size(); ++i) {
    const at::Tensor& r = out.results[i];
    if (!r.requires_grad()) continue;
    const at::Tensor part = (r * bring(weight_of(r, i))).sum();
    loss = loss.defined() ? loss + part : part;
  }
  if (loss.defined()) loss.backward();
  for (const at::Tensor& t : inputs) out.gradients.push_back(t.grad());
  return out;
}

std::string difference(const at::Tensor& got, const at::Tensor& want, double tolerance) {
  if (!is_dtensor(got)) return "not a DTensor";
  if (got.scalar_type() != want.scalar_type()) {
    return fmt::format("dtype {}, not {}", c10::toString(got.scalar_type()), c10::toString(want.scalar_type()));
  }
  if (got.sizes() != want.sizes()) {
    return fmt::format("sizes [{}], not [{}]", fmt::join(got.sizes(), ", "), fmt::join(want.sizes(), ", "));
  }
  const at::Tensor whole = full_tensor(got.detach());
  return close(whole, want, tolerance) ? "" : "other values, laid out as " + to_string(placements_of(got));
}

Placements whole_terms(Placements placements) {
  for (Placement& p : placements) {
    if (p.is_partial()) p = Replicate();
  }
  return placements;
}

// Returns what is wrong with `c` on inputs of these layouts; "" if nothing is.
std::string problem(const OpCase& c, const DeviceMesh& mesh, const std::vector<Placements>& layouts,
                    const Outcome& want) {
  Tensors inputs;
  for (std::size_t i = 0; i < c.inputs.size(); ++i) inputs.push_back(spread(c.inputs[i], mesh, layouts[i]));
  const Placements whole(static_cast<std::size_t>(mesh.ndim()), Replicate());
  Outcome got;
  try {
    got = run(c, inputs, [&](const at::Tensor& w) { return spread(w, mesh, whole); });
  } catch (const std::exception& error) {
    return fmt::format("threw: {}", error.what());
  }
  if (got.results.size() != want.results.size()) return "another number of results";
  for (std::size_t i = 0; i < got.results.size(); ++i) {
    const std::string d = difference(got.results[i], want.results[i].detach(), c.tolerance);
    if (!d.empty()) return fmt::format("result {}: {}", i, d);
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!want.gradients[i].defined() && !got.gradients[i].defined()) continue;
    if (!got.gradients[i].defined()) return fmt::format("gradient {}: none", i);
    const at::Tensor expected = want.gradients[i].defined() ? want.gradients[i] : at::zeros_like(c.inputs[i]);
    const std::string d = difference(got.gradients[i], expected, c.tolerance);
    if (!d.empty()) return fmt::format("gradient {}: {}", i, d);
    if (placements_of(got.gradients[i]) != whole_terms(layouts[i])) {
      return fmt::format("gradient {} is laid out as {}", i, to_string(placements_of(got.gradients[i])));
    }
  }
  return "";
}

Placements kinds_of(const at::Tensor& input) {
  Placements out = {Replicate()};
  for (int64_t d = 0; d < input.dim(); ++d) out.push_back(Shard(d));
  if (input.scalar_type() != at::kBool) out.push_back(Partial());
  return out;
}

// Returns all numbers below `count` where they are few, else `most` different ones, which the seed decides.
std::set<std::size_t> numbers_below(std::size_t count, std::size_t most, const std::string& seed) {
  constexpr std::size_t kFew = 16;  // all layouts of two matrices on one mesh dimension
  std::set<std::size_t> out;
  if (count <= std::max(most, kFew)) {
    for (std::size_t k = 0; k < count; ++k) out.insert(k);
    return out;
  }
  std::seed_seq numbers(seed.begin(), seed.end());
  std::mt19937 random(numbers);
  while (out.size() < most) out.insert(random() % count);
  return out;
}

// Returns layouts of all inputs on the mesh: all of them, or a sample that differs between meshes.
std::vector<std::vector<Placements>> layouts_of(const OpCase& c, const DeviceMesh& mesh, std::size_t most) {
  std::vector<std::vector<Placements>> each;
  std::size_t count = 1;
  for (std::size_t i = 0; i < c.inputs.size(); ++i) {
    each.push_back(
        all_layouts(mesh.ndim(), i < c.kinds.size() && !c.kinds[i].empty() ? c.kinds[i] : kinds_of(c.inputs[i])));
    count *= each.back().size();
  }
  std::vector<std::vector<Placements>> out;
  for (std::size_t index : numbers_below(count, most, c.name + mesh.to_string())) {
    std::vector<Placements> chosen;
    for (const auto& choices : each) {
      chosen.push_back(choices[index % choices.size()]);
      index /= choices.size();
    }
    out.push_back(std::move(chosen));
  }
  return out;
}

Tensors copies(const Tensors& tensors) {
  Tensors out;
  for (const at::Tensor& t : tensors) out.push_back(t.detach().clone());
  return out;
}

}  // namespace

void check_ops(const std::vector<OpCase>& cases, std::size_t most) {
  for (const OpCase& c : cases) {
    const Outcome want = run(c, copies(c.inputs), [](const at::Tensor& w) { return w; });
    for (const DeviceMesh& mesh : meshes()) {
      for (const auto& layouts : layouts_of(c, mesh, most)) {
        std::string text = c.name + " on " + mesh.to_string() + " of";
        for (const Placements& p : layouts) text += " " + to_string(p);
        CAPTURE(text);
        CHECK(problem(c, mesh, layouts, want) == "");
      }
    }
  }
}

std::string collectives_of(const DeviceMesh& mesh, const std::function<void()>& call) {
  const CommCounter counter(mesh);
  call();
  std::string out;
  for (const CollectiveRecord& record : counter.records()) {
    out += std::string(record.kind) + ' ' + std::to_string(record.bytes) + ' ';
  }
  return out;
}

}  // namespace tessera::testing
