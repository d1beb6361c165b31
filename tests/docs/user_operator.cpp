// The program of docs/custom-placement.md: an operator of its own, with a gradient and a sharding rule.

#include <iostream>

#include <torch/library.h>
#include <torch/torch.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/ops/rules/rule.h"

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

// Calls the operator: x [n, m], scale [n] -> [n, m], in which each row of x is multiplied by its number.
at::Tensor scale_rows(const at::Tensor& x, const at::Tensor& scale) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("mylib::scale_rows", "")
                             .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
  return op.call(x, scale);
}

// Computes it from plain tensors. This is what runs on each rank's pieces.
at::Tensor scale_rows_cpu(const at::Tensor& x, const at::Tensor& scale) { return x * scale.unsqueeze(1); }

// Gives the result's sizes, without values.
at::Tensor scale_rows_meta(const at::Tensor& x, const at::Tensor&) { return at::empty_like(x); }

struct ScaleRows : torch::autograd::Function<ScaleRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& scale) {
    context->save_for_backward({x, scale});
    const at::AutoDispatchBelowADInplaceOrView below;
    return scale_rows(x, scale);
  }
  static tensor_list backward(AutogradContext* context, const tensor_list& grads) {
    const auto saved = context->get_saved_variables();
    return {scale_rows(grads[0], saved[1]), (grads[0] * saved[0]).sum(1)};
  }
};

TORCH_LIBRARY(mylib, m) { m.def("scale_rows(Tensor x, Tensor scale) -> Tensor"); }
TORCH_LIBRARY_IMPL(mylib, CPU, m) { m.impl("scale_rows", scale_rows_cpu); }
TORCH_LIBRARY_IMPL(mylib, Meta, m) { m.impl("scale_rows", scale_rows_meta); }
TORCH_LIBRARY_IMPL(mylib, Autograd, m) {
  m.impl("scale_rows", [](const at::Tensor& x, const at::Tensor& scale) { return ScaleRows::apply(x, scale); });
}

// Says what one mesh dimension may do: cut the rows of all three tensors, or the columns of x and of the result. The
// operator is linear in x and in scale, so either may be pending while the other is whole.
tessera::rules::OpRule scale_rows_rule(const tessera::rules::OpCall&) {
  tessera::rules::OpRule rule{.strategies = tessera::rules::shard_factors({"nm", "n"}, {"nm"})};
  tessera::rules::add_linear(rule, /*num_inputs=*/2, /*num_outputs=*/1, {{0}, {1}});
  return rule;
}

}  // namespace

int main() {
  tessera::rules::register_rule("mylib::scale_rows", scale_rows_rule);  // on every rank, before the first call
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {4}, {"tp"});
  const at::Tensor x = tessera::distribute_tensor(torch::ones({6, 3}), mesh, {tessera::Shard(1)}).requires_grad_();
  const at::Tensor scale = tessera::distribute_tensor(torch::arange(6.0), mesh, {tessera::Replicate()});

  const tessera::CommCounter counter(mesh);
  const at::Tensor y = scale_rows(x, scale);
  y.sum().backward();
  const int64_t collectives = counter.total();
  const double total = tessera::full_tensor(x.grad()).sum().item<double>();
  if (mesh.world().rank() > 0) return 0;
  std::cout << tessera::to_string(y) << "\ncollectives: " << collectives << ", sum of the gradient: " << total << '\n';
}
