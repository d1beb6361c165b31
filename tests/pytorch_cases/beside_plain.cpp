#include "tessera/tests/pytorch_cases/beside_plain.h"

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/in_process.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"

namespace tessera::testing {
namespace {

// Returns a different weight for each element, so that neighbouring gradients differ.
at::Tensor weights_of(const at::Tensor& t) {
  return at::arange(1, t.numel() + 1, on(at::kDouble)).mul(0.7).cos().view(t.sizes()).to(t.scalar_type());
}

Placements replicated(const DeviceMesh& mesh) { return Placements(static_cast<std::size_t>(mesh.ndim()), Replicate()); }

bool differentiable(const at::Tensor& t) {
  return at::isFloatingType(t.scalar_type()) || at::isComplexType(t.scalar_type());
}

}  // namespace

void on_mesh(const std::vector<int64_t>& shape, const std::function<void(const DeviceMesh&)>& body) {
  run_in_process(c10::multiply_integers(shape),
                 [&](const std::shared_ptr<World>& world) { body(init_device_mesh(device_name(), shape, {}, world)); });
}

void on_lines(const std::function<void(const DeviceMesh&)>& body) {
  for (const int64_t ranks : {1, 2, 3, 4}) on_mesh({ranks}, body);
}

std::string counts(const CommCounter& counter) {
  std::string text;
  for (const char* kind :
       {"all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast", "scatter", "permute"}) {
    const int64_t count = counter.count(kind);
    if (count > 0) text += (text.empty() ? "" : " ") + std::string(kind) + ' ' + std::to_string(count);
  }
  return text.empty() ? "-" : text;
}

Ran beside_plain(const DeviceMesh& mesh, const std::vector<Operand>& operands, const Operator& f, double tolerance) {
  Tensors plain;
  Ran ran;
  for (const Operand& operand : operands) {
    CAPTURE(to_string(operand.placements));
    const bool grad = differentiable(operand.whole);
    plain.push_back(operand.whole.detach().clone().requires_grad_(grad));
    ran.inputs.push_back(spread(operand.whole, mesh, operand.placements).requires_grad_(grad));
  }
  const at::Tensor want = f(plain);
  CommCounter counter(mesh);
  ran.result = f(ran.inputs);
  ran.forward = counts(counter);
  CHECK(close(full_tensor(ran.result.detach()), want.detach(), tolerance));
  CHECK(ran.result.requires_grad() == want.requires_grad());
  if (!want.requires_grad() || !ran.result.requires_grad()) return ran;
  const at::Tensor weights = weights_of(want);
  (want * weights).sum().backward();
  const at::Tensor loss = (ran.result * spread(weights, mesh, replicated(mesh))).sum();
  counter.reset();
  loss.backward();
  ran.backward = counts(counter);
  for (std::size_t i = 0; i < operands.size(); ++i) {
    CAPTURE(i);
    const at::Tensor& wanted = plain[i].grad();
    const at::Tensor& grad = ran.inputs[i].grad();
    CHECK(grad.defined() == wanted.defined());
    if (!grad.defined() || !wanted.defined()) continue;
    CHECK(placements_of(grad) == without_partial(operands[i].placements));
    CHECK(close(full_tensor(grad), wanted, tolerance));
  }
  return ran;
}

}  // namespace tessera::testing
