#include "tessera/layers/sharded_linear.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
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
#include "tessera/dtensor/tangent.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/mesh_checks.h"
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

  bool sums_output() const { return options.reduce_output && mesh->size() > 1; }

  int64_t whole_rows(const at::Tensor& piece) const {
    return options.sequence_size >= 0 ? options.sequence_size : piece.size(0) * mesh->size();
  }
  // Returns the number of elements of each rank's rows, where the whole has `rows` rows of `row` elements.
  std::vector<int64_t> counts(int64_t rows, int64_t row) const {
    std::vector<int64_t> out;
    for (int64_t rank = 0; rank < mesh->size(); ++rank)
      out.push_back(chunk_range(rows, mesh->size(), rank).size() * row);
    return out;
  }
};

int64_t row_numel(const at::Tensor& t) { return c10::multiply_integers(t.sizes().slice(1)); }

// Gathers the rows of all ranks while other work goes on.
struct Rows {
  Rows(const at::Tensor& piece, const Plan& plan, WaitTime wait_time = WaitTime::kLater)
      : sizes(piece.sizes().vec()),
        flat(start_all_gather(piece.contiguous().view({-1}), plan.counts(plan.whole_rows(piece), row_numel(piece)),
                              *plan.mesh, 0, wait_time)) {
    sizes[0] = plan.whole_rows(piece);
  }
  at::Tensor wait() { return flat.wait().view(sizes); }

  std::vector<int64_t> sizes;
  PendingCollective flat;
};

at::Tensor by_rows(const at::Tensor& t) { return t.dim() == 1 ? t.unsqueeze(0) : t.flatten(0, -2); }

struct ShardedLinear : torch::autograd::Function<ShardedLinear> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, const Plan& plan) {
    detail::saved<Plan>(ctx, "plan") = plan;
    const bool keeps = weight.requires_grad() && !plan.options.frozen_weight;
    ctx->saved_data["sizes"] = input.sizes();
    ctx->saved_data["bias"] = bias.has_value();
    ctx->save_for_backward({keeps ? input : at::Tensor(), input.requires_grad() ? weight : at::Tensor()});
    if (!plan.sums_output())
      return at::linear(plan.gathers() ? Rows(input, plan, WaitTime::kAtOnce).wait() : input, weight, bias);
    const at::Tensor sum =
        start_all_reduce(at::linear(input, weight), *plan.mesh, 0, ReduceOp::kSum, /*owned=*/true, WaitTime::kAtOnce)
            .wait();
    return bias ? sum.add_(*bias) : sum;
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const Plan& plan = detail::saved<Plan>(ctx, "plan");
    const tensor_list saved = ctx->get_saved_variables();
    const at::Tensor &input = saved[0], &g = grads[0];
    const bool is_frozen = plan.options.frozen_weight && saved[1].defined();
    const at::Tensor weight = is_frozen ? saved[1].detach() : saved[1];
    const bool wants_weight = input.defined() && ctx->needs_input_grad(1);
    tensor_list out(4);
    if (c10::GradMode::is_enabled() || detail::has_tangent(g)) {
      // The gradient of a sum is the same on all ranks, and each rank's columns use it for their own part.
      const at::Tensor used = plan.sums_output() ? copy_to_region(g, *plan.mesh) : g;
      if (ctx->needs_input_grad(0)) out[0] = differentiable_input_gradient(used, weight, plan);
      if (input.defined()) check_in_graph(plan);
      if (wants_weight) out[1] = differentiable_weight_gradient(used, input, plan);
    } else {
      std::optional<Rows> rows;
      if (wants_weight && plan.gathers()) rows.emplace(input, plan);
      const auto whole_input = [&] { return rows ? rows->wait() : input; };
      // The collective runs while the next product is computed.
      std::optional<PendingCollective> reduced;
      if (ctx->needs_input_grad(0)) {
        const at::Tensor term = at::matmul(g, weight.conj());
        const at::Tensor whole = whole_input();
        reduced.emplace(begin_reduction(term, plan));
        if (wants_weight) out[1] = weight_gradient(g, whole, plan.options.main_grad);
        out[0] = reduced->wait().view(ctx->saved_data["sizes"].toIntVector());
      } else if (wants_weight) {
        out[1] = weight_gradient(g, whole_input(), plan.options.main_grad);
      }
    }
    if (ctx->saved_data["bias"].toBool() && ctx->needs_input_grad(2)) out[2] = by_rows(g).sum(0);
    return out;
  }

 private:
  // Starts the reduction of the input's gradient; `term` is this rank's term of it.
  static PendingCollective begin_reduction(const at::Tensor& term, const Plan& plan) {
    if (plan.reduces()) return start_all_reduce(term, *plan.mesh, 0, ReduceOp::kSum, /*owned=*/true);
    if (!plan.gathers()) return PendingCollective(term);
    return start_reduce_scatter(term.contiguous().view({-1}), plan.counts(term.size(0), row_numel(term)), *plan.mesh, 0,
                                ReduceOp::kSum);
  }

  // Returns an undefined tensor where the gradient was added to `main_grad`.
  static at::Tensor weight_gradient(const at::Tensor& g, const at::Tensor& input, const at::Tensor& main_grad) {
    const at::Tensor left = by_rows(g).t(), right = by_rows(input).conj();
    if (!main_grad.defined()) return at::mm(left, right);
    main_grad.detach().addmm_(left.to(main_grad.scalar_type()), right.to(main_grad.scalar_type()));
    return {};
  }

  static at::Tensor differentiable_input_gradient(const at::Tensor& g, const at::Tensor& weight, const Plan& plan) {
    const at::Tensor term = at::matmul(g, weight.conj());
    if (plan.gathers()) return reduce_scatter_to_sequence_region(term, *plan.mesh, /*allow_uneven=*/true);
    return plan.reduces() ? reduce_from_region(term, *plan.mesh) : term;
  }

  static void check_in_graph(const Plan& plan) {
    if (!plan.options.main_grad.defined()) return;
    throw std::invalid_argument(
        "sharded_linear: a gradient of the gradient, or its forward-mode derivative, was asked for, but the weight's "
        "gradient goes to main_grad, outside of the graph; leave main_grad out");
  }

  static at::Tensor differentiable_weight_gradient(const at::Tensor& g, const at::Tensor& input, const Plan& plan) {
    at::Tensor whole = input;
    if (plan.gathers()) whole = gather_from_sequence_region(input, *plan.mesh, true, plan.whole_rows(input));
    if (plan.reduces()) whole = copy_to_region(input, *plan.mesh);
    return at::mm(by_rows(g).t(), by_rows(whole).conj());
  }
};

// Computes the same by operators that have formulas for tangents, which ShardedLinear does not have.
at::Tensor in_forward_mode(const at::Tensor& input, const at::Tensor& given_weight,
                           const std::optional<at::Tensor>& bias, const Plan& plan) {
  if (plan.options.main_grad.defined()) {
    throw std::invalid_argument(
        "sharded_linear: an input, a weight or a bias has a forward-mode derivative, but the weight's gradient goes to "
        "main_grad, outside of the graph; leave main_grad out");
  }
  if (plan.options.frozen_weight && detail::has_tangent(given_weight)) {
    throw std::invalid_argument(
        "sharded_linear: a frozen weight has a forward-mode derivative; leave frozen_weight or the derivative out");
  }
  const at::Tensor weight = plan.options.frozen_weight ? given_weight.detach() : given_weight;
  if (plan.sums_output()) {
    const at::Tensor sum = reduce_from_region(at::linear(input, weight), *plan.mesh);
    return bias ? sum + *bias : sum;
  }
  at::Tensor whole = input;
  if (plan.gathers()) whole = gather_from_sequence_region(input, *plan.mesh, true, plan.whole_rows(input));
  if (plan.reduces()) whole = copy_to_region(input, *plan.mesh);
  return at::linear(whole, weight, bias);
}

// Casts as autocast does for a linear layer. It is done here because backward runs without autocast and must see what
// forward multiplied.
at::Tensor as_cast(const at::Tensor& t) {
  if (!t.defined() || !at::isFloatingType(t.scalar_type()) || t.scalar_type() == at::kDouble || is_dtensor(t)) return t;
  const c10::DeviceType device = t.device().type();
  return at::autocast::is_autocast_enabled(device) ? t.to(at::autocast::get_autocast_dtype(device)) : t;
}

constexpr const char* kName = "sharded_linear";

std::string shown(const at::Tensor& t) {
  return fmt::format("{} [{}]", c10::toString(t.scalar_type()), fmt::join(t.sizes(), ", "));
}

// Checks what is the same on all ranks.
void check_call(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, const DeviceMesh& mesh,
                const ShardedLinearOptions& options) {
  const at::Tensor& main_grad = options.main_grad;
  const auto refuse = [](const std::string& why) { throw std::invalid_argument(fmt::format("{}: {}", kName, why)); };
  check_one_dimension(mesh, kName);
  if (options.reduce_output && (options.reduce_input_gradient || options.sequence_parallel)) {
    refuse(
        "reduce_output is for columns of the weight, reduce_input_gradient and sequence_parallel are for rows; give "
        "one");
  }
  if (!input.defined() || !weight.defined()) refuse("the input or the weight is undefined");
  if (is_dtensor(input) || is_dtensor(weight) || is_dtensor(bias) || is_dtensor(main_grad)) {
    refuse("a DTensor was given; give this rank's piece, to_local(t)");
  }
  check_device(input, mesh, kName, "input");
  check_device(weight, mesh, kName, "weight");
  check_device(bias, mesh, kName, "bias");
  check_device(main_grad, mesh, kName, "main_grad");
}

// Checks pieces, which may be wrong on this rank alone.
void check_pieces(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, const DeviceMesh& mesh,
                  const at::Tensor& main_grad) {
  const auto refuse = [&](const std::string& why) { refuse_alone(mesh, kName, why); };
  if (input.dim() < 1 || weight.dim() != 2 || input.size(-1) != weight.size(1)) {
    refuse(fmt::format("input {} and weight {}; they are [*, in] and [out, in]", shown(input), shown(weight)));
  }
  if (input.scalar_type() != weight.scalar_type()) {
    refuse(fmt::format("input {} and weight {}; they have one dtype", shown(input), shown(weight)));
  }
  if (bias.defined() &&
      (bias.dim() != 1 || bias.size(0) != weight.size(0) || bias.scalar_type() != weight.scalar_type())) {
    refuse(fmt::format("bias {} for weight {}; give one element per output feature, of the same dtype", shown(bias),
                       shown(weight)));
  }
  if (main_grad.defined() &&
      (main_grad.sizes() != weight.sizes() ||
       (main_grad.scalar_type() != at::kFloat && main_grad.scalar_type() != weight.scalar_type()))) {
    refuse(fmt::format("main_grad is {}, the weight {}; it has the weight's sizes, and float32 or its dtype",
                       shown(main_grad), shown(weight)));
  }
}

void check_sequence(const at::Tensor& input, const DeviceMesh& mesh, int64_t sequence_size) {
  const Interval mine = chunk_range(std::max<int64_t>(sequence_size, 0), mesh.size(), mesh.local_rank(0));
  if (input.dim() >= 2 && (sequence_size < 0 || input.size(0) == mine.size())) return;
  refuse_alone(mesh, kName,
               fmt::format("input {} is no piece of a sequence of {}; this rank's part of it is [{}, *]", shown(input),
                           sequence_size, mine.size()));
}

}  // namespace

at::Tensor sharded_linear(const at::Tensor& given_input, const at::Tensor& given_weight, const at::Tensor& given_bias,
                          const DeviceMesh& mesh, const ShardedLinearOptions& options) {
  check_call(given_input, given_weight, given_bias, mesh, options);
  const at::Tensor input = as_cast(given_input), weight = as_cast(given_weight), bias = as_cast(given_bias);
  check_pieces(input, weight, bias, mesh, options.main_grad);
  if (options.sequence_parallel) check_sequence(input, mesh, options.sequence_size);
  const std::optional<at::Tensor> added = bias.defined() ? std::make_optional(bias) : std::nullopt;
  const Plan plan{.mesh = mesh, .options = options};
  if (detail::has_tangent(input) || detail::has_tangent(weight) || detail::has_tangent(added)) {
    return in_forward_mode(input, weight, added, plan);
  }
  return ShardedLinear::apply(input, weight, added, plan);
}

}  // namespace tessera
