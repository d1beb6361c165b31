#include "tessera/ops/kernels/sharded_linear.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/autocast_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/mappings.h"
#include "tessera/dtensor/saved.h"
#include "tessera/mesh/collectives.h"
#include "tessera/placement/partition.h"

namespace tessera {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

struct Plan {
  std::optional<DeviceMesh> mesh;
  ShardedLinearOptions options;

  bool gathers() const { return options.sequence_parallel && mesh->size() > 1; }
  bool reduces() const { return options.reduce_input_gradient && mesh->size() > 1 && !gathers(); }

  int64_t whole_rows(const at::Tensor& piece) const {
    return options.sequence_size >= 0 ? options.sequence_size : piece.size(0) * mesh->size();
  }
  // Elements of each rank's rows, where the whole has `rows` of `row` elements.
  std::vector<int64_t> counts(int64_t rows, int64_t row) const {
    std::vector<int64_t> out;
    for (int64_t rank = 0; rank < mesh->size(); ++rank) out.push_back(chunk_range(rows, mesh->size(), rank).size() * row);
    return out;
  }
};

int64_t row_numel(const at::Tensor& t) { return c10::multiply_integers(t.sizes().slice(1)); }

// Rows of all ranks on their way to each.
struct Rows {
  Rows(const at::Tensor& piece, const Plan& plan)
      : sizes(piece.sizes().vec()),
        flat(start_all_gather(piece.contiguous().view({-1}), plan.counts(plan.whole_rows(piece), row_numel(piece)),
                              *plan.mesh, 0)) {
    sizes[0] = plan.whole_rows(piece);
  }
  at::Tensor wait() { return flat.wait().view(sizes); }

  std::vector<int64_t> sizes;
  Started flat;
};

at::Tensor by_rows(const at::Tensor& t) { return t.dim() == 1 ? t.unsqueeze(0) : t.flatten(0, -2); }

struct ShardedLinear : torch::autograd::Function<ShardedLinear> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, const Plan& plan) {
    detail::saved<Plan>(ctx, "plan") = plan;
    const bool keeps = weight.requires_grad() && !plan.options.frozen_weight;
    ctx->saved_data["sizes"] = input.sizes();
    ctx->saved_data["bias"] = bias.has_value();
    ctx->save_for_backward({keeps ? input : at::Tensor(), weight});
    return at::linear(plan.gathers() ? Rows(input, plan).wait() : input, weight, bias);
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const Plan& plan = detail::saved<Plan>(ctx, "plan");
    const tensor_list saved = ctx->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1], &g = grads[0];
    tensor_list out(4);
    if (c10::GradMode::is_enabled()) {
      if (ctx->needs_input_grad(0)) out[0] = differentiable_input_gradient(g, weight, plan);
      if (input.defined()) out[1] = differentiable_weight_gradient(g, input, plan);
    } else {
      std::optional<Rows> rows;
      if (input.defined() && plan.gathers()) rows.emplace(input, plan);
      const auto whole_input = [&] { return rows ? rows->wait() : input; };
      // What travels does so while the next product is computed.
      std::optional<Started> reduced;
      if (ctx->needs_input_grad(0)) {
        const at::Tensor term = at::matmul(g, weight);
        const at::Tensor whole = whole_input();
        reduced.emplace(begin_reduction(term, plan));
        if (input.defined()) out[1] = weight_gradient(g, whole, plan.options.main_grad);
        out[0] = reduced->wait().view(ctx->saved_data["sizes"].toIntVector());
      } else if (input.defined()) {
        out[1] = weight_gradient(g, whole_input(), plan.options.main_grad);
      }
    }
    if (ctx->saved_data["bias"].toBool() && ctx->needs_input_grad(2)) out[2] = by_rows(g).sum(0);
    return out;
  }

 private:
  // The gradient of the input, of which `term` is this rank's term, on its way.
  static Started begin_reduction(const at::Tensor& term, const Plan& plan) {
    if (plan.reduces()) return start_all_reduce(term, *plan.mesh, 0, ReduceOp::kSum, /*owned=*/true);
    if (!plan.gathers()) return Started(term);
    return start_reduce_scatter(term.contiguous().view({-1}), plan.counts(term.size(0), row_numel(term)), *plan.mesh, 0,
                                ReduceOp::kSum);
  }

  // Undefined where it went to `main_grad`.
  static at::Tensor weight_gradient(const at::Tensor& g, const at::Tensor& input, const at::Tensor& main_grad) {
    const at::Tensor left = by_rows(g).t(), right = by_rows(input);
    if (!main_grad.defined()) return at::mm(left, right);
    main_grad.detach().addmm_(left.to(main_grad.scalar_type()), right.to(main_grad.scalar_type()));
    return {};
  }

  static at::Tensor differentiable_input_gradient(const at::Tensor& g, const at::Tensor& weight, const Plan& plan) {
    const at::Tensor term = at::matmul(g, weight);
    if (plan.gathers()) return reduce_scatter_to_sequence_region(term, *plan.mesh, /*allow_uneven=*/true);
    return plan.reduces() ? reduce_from_region(term, *plan.mesh) : term;
  }

  static at::Tensor differentiable_weight_gradient(const at::Tensor& g, const at::Tensor& input, const Plan& plan) {
    if (plan.options.main_grad.defined()) {
      throw std::invalid_argument(
          "sharded_linear: a gradient of the gradient, but the weight's goes to main_grad, outside of the graph; leave "
          "main_grad out");
    }
    at::Tensor whole = input;
    if (plan.gathers()) whole = gather_from_sequence_region(input, *plan.mesh, true, plan.whole_rows(input));
    if (plan.reduces()) whole = copy_to_region(input, *plan.mesh);
    return at::mm(by_rows(g).t(), by_rows(whole));
  }
};

// As autocast has it for a linear layer: here, since backward, which runs without autocast, must find what forward multiplied.
at::Tensor as_cast(const at::Tensor& t) {
  if (!t.defined() || !at::isFloatingType(t.scalar_type()) || t.scalar_type() == at::kDouble || is_dtensor(t)) return t;
  const c10::DeviceType device = t.device().type();
  return at::autocast::is_autocast_enabled(device) ? t.to(at::autocast::get_autocast_dtype(device)) : t;
}

void check(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, const DeviceMesh& mesh,
           const ShardedLinearOptions& options) {
  const auto refuse = [](const std::string& why) { throw std::invalid_argument("sharded_linear: " + why); };
  if (mesh.ndim() != 1) {
    refuse(fmt::format("mesh {} has {} dimensions; give one of them, mesh[\"name\"]", mesh.to_string(), mesh.ndim()));
  }
  if (!input.defined() || !weight.defined()) refuse("the input or the weight is undefined");
  if (is_dtensor(input) || is_dtensor(weight) || is_dtensor(bias) || is_dtensor(options.main_grad)) {
    refuse("a DTensor was given; to_local(t) is this rank's piece");
  }
  if (input.dim() < 1 || weight.dim() != 2 || input.size(-1) != weight.size(1)) {
    refuse(fmt::format("input [{}] and weight [{}]; they are [*, in] and [out, in]", fmt::join(input.sizes(), ", "),
                       fmt::join(weight.sizes(), ", ")));
  }
  if (input.scalar_type() != weight.scalar_type()) {
    refuse(fmt::format("an input of {} and a weight of {}; they have one dtype", c10::toString(input.scalar_type()),
                       c10::toString(weight.scalar_type())));
  }
  if (bias.defined() && (bias.dim() != 1 || bias.size(0) != weight.size(0))) {
    refuse(fmt::format("bias [{}] for weight [{}]; it has one element an output", fmt::join(bias.sizes(), ", "),
                       fmt::join(weight.sizes(), ", ")));
  }
  const at::Tensor& grad = options.main_grad;
  if (grad.defined() &&
      (grad.sizes() != weight.sizes() || (grad.scalar_type() != at::kFloat && grad.scalar_type() != weight.scalar_type()))) {
    refuse(fmt::format("main_grad is {} [{}], the weight {} [{}]; it has the weight's sizes, and float32 or its dtype",
                       c10::toString(grad.scalar_type()), fmt::join(grad.sizes(), ", "), c10::toString(weight.scalar_type()),
                       fmt::join(weight.sizes(), ", ")));
  }
  if (!options.sequence_parallel) return;
  const Interval mine = chunk_range(std::max<int64_t>(options.sequence_size, 0), mesh.size(), mesh.local_rank(0));
  if (input.dim() < 2 || (options.sequence_size >= 0 && input.size(0) != mine.size())) {
    refuse(fmt::format("input [{}] is no piece of a sequence of {}; of that this rank has [{}, *]",
                       fmt::join(input.sizes(), ", "), options.sequence_size, mine.size()));
  }
}

}  // namespace

at::Tensor sharded_linear(const at::Tensor& given_input, const at::Tensor& given_weight, const at::Tensor& given_bias,
                          const DeviceMesh& mesh, const ShardedLinearOptions& options) {
  const at::Tensor input = as_cast(given_input), weight = as_cast(given_weight), bias = as_cast(given_bias);
  check(input, weight, bias, mesh, options);
  return ShardedLinear::apply(input, weight, bias.defined() ? std::make_optional(bias) : std::nullopt,
                              Plan{.mesh = mesh, .options = options});
}

}  // namespace tessera
