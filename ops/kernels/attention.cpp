// Handles scaled_dot_product_attention and torch.nn.MultiheadAttention on DTensors, before LibTorch picks a kernel.

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ExpandUtils.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_attention_math_native.h>
#include <ATen/ops/add.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/logical_not.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/scaled_dot_product_attention_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include "tessera/dtensor/core/memory_order.h"
#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random/draws.h"
#include "tessera/dtensor/tangent.h"
#include "tessera/ops/kernels/arguments.h"
#include "tessera/ops/kernels/blocked_attention.h"

namespace tessera {
namespace {

using Optional = std::optional<at::Tensor>;

constexpr const char* kName = "aten::scaled_dot_product_attention";

bool is_plain(const at::Tensor& t) { return t.defined() && !detail::is_dtensor(t); }

// LibTorch makes a causal mask, a plain tensor that is the same on every rank. Only that mask counts as replicated, not
// the caller's tensors.
std::tuple<at::Tensor, at::Tensor> attention_math(const at::Tensor& query, const at::Tensor& key,
                                                  const at::Tensor& value, const Optional& mask, double dropout,
                                                  bool causal, const Optional& dropout_mask,
                                                  std::optional<double> scale, bool grouped) {
  const bool any_plain =
      is_plain(query) || is_plain(key) || is_plain(value) || (dropout_mask && is_plain(*dropout_mask));
  const ImplicitReplication own_mask((causal && !any_plain) || ImplicitReplication::enabled());
  return at::native::_scaled_dot_product_attention_math(query, key, value, mask, dropout, causal, dropout_mask, scale,
                                                        grouped);
}

// Returns the terms that a bool mask adds to the scores: 0 or minus infinity.
Optional as_terms(const Optional& mask, at::ScalarType dtype) {
  if (!mask || !mask->defined() || mask->scalar_type() != at::kBool) return mask;
  constexpr double kNever = -std::numeric_limits<double>::infinity();
  return at::zeros_like(*mask, mask->options().dtype(dtype)).masked_fill(mask->logical_not(), kNever);
}

// Holds the tensors of one call.
struct Operands {
  const at::Tensor& query;
  const at::Tensor& key;
  const at::Tensor& value;
  const Optional& mask;

  bool masked() const { return mask && mask->defined(); }
};

// Returns whether each rank's piece of the mask belongs to its piece of the scores.
bool mask_fits(const at::Tensor& mask, const at::Tensor& query, const Placements& placements) {
  if (!is_dtensor(mask) || !(mesh_of(mask) == mesh_of(query)) || mask.dim() > 4) return false;
  for (std::size_t i = 0; i < placements.size(); ++i) {
    const Placement& here = placements_of(mask)[i];
    if (placements[i].is_replicate()) {
      if (!here.is_replicate()) return false;
      continue;
    }
    const int64_t dim = placements[i].tensor_dim();  // counted in four dimensions
    const int64_t own = dim - (4 - mask.dim());
    const bool broadcasts = own < 0 || mask.size(own) == 1;
    if (broadcasts ? !here.is_replicate() : !(here == Shard(own) && mask.size(own) == query.size(dim))) return false;
  }
  return true;
}

// Checks the mask's shape and dtype, since an error of LibTorch's on the pieces would fail the job.
bool mask_is_valid(const Operands& in) {
  const at::Tensor& mask = *in.mask;
  const bool type = mask.scalar_type() == at::kBool || mask.scalar_type() == in.query.scalar_type();
  return type &&
         at::is_expandable_to(mask.sizes(), {in.query.size(0), in.query.size(1), in.query.size(2), in.key.size(2)});
}

// Returns whether each rank's heads of queries use its own heads of keys, of which each serves a group of the former.
bool groups_fit(const Operands& in) {
  const int64_t heads = in.query.size(1), shared = in.key.size(1);
  if (heads == shared) return true;
  int64_t parts = 1;
  const Placements& placements = placements_of(in.query);
  for (std::size_t i = 0; i < placements.size(); ++i) {
    if (!placements[i].is_replicate() && placements[i].tensor_dim() == 1)
      parts *= mesh_of(in.query).size(static_cast<int64_t>(i));
  }
  return shared > 0 && heads % shared == 0 && shared % parts == 0;
}

// Returns whether every rank holds whole items and heads, the same of all tensors, so that attention on the pieces
// gives a piece of the result. Calls that LibTorch would refuse are left to it.
bool fits_pieces(const Operands& in, bool grouped) {
  static const Placement items = Shard(0), heads = Shard(1);
  for (const at::Tensor* const t : {&in.query, &in.key, &in.value}) {
    if (!is_dtensor(*t) || t->dim() != 4 || !(mesh_of(*t) == mesh_of(in.query)) || !mesh_of(*t).is_member())
      return false;
    if (t->scalar_type() != in.query.scalar_type() || placements_of(*t) != placements_of(in.query)) return false;
    if (t->size(0) != in.query.size(0)) return false;
  }
  if (in.key.size(1) != in.value.size(1) || (!grouped && in.key.size(1) != in.query.size(1))) return false;
  if (in.masked() && !mask_is_valid(in)) return false;
  const Placements& placements = placements_of(in.query);
  const auto whole_heads = [](const Placement& p) { return p.is_replicate() || p == items || p == heads; };
  return in.query.size(3) == in.key.size(3) && in.key.size(2) == in.value.size(2) &&
         std::ranges::all_of(placements, whole_heads) && groups_fit(in) &&
         (!in.masked() || mask_fits(*in.mask, in.query, placements));
}

// Computes attention on plain tensors by the kernel that LibTorch picks. Kernels may refuse a piece without items or
// heads; for such a piece only the sizes and the graph are made.
at::Tensor on_plain(const Operands& in, bool causal, std::optional<double> scale) {
  const bool grouped = in.query.size(1) != in.key.size(1);
  if (in.query.size(0) * in.query.size(1) > 0)
    return at::scaled_dot_product_attention(in.query, in.key, in.value, in.mask, 0, causal, scale, grouped);
  if (grouped) {
    const int64_t heads = in.query.size(1) / in.key.size(1);
    const at::Tensor key = in.key.repeat_interleave(heads, 1), value = in.value.repeat_interleave(heads, 1);
    return on_plain({in.query, key, value, in.mask}, causal, scale);
  }
  at::Tensor scores = at::matmul(in.query, in.key.transpose(-2, -1));
  if (in.masked()) scores = at::add(scores, *as_terms(in.mask, scores.scalar_type()));
  return at::matmul(scores, in.value);
}

// Returns one mask that combines the given one with a causal one. Only some of LibTorch's kernels accept the two
// separately.
Optional with_triangle(const Operands& in) {
  const at::Tensor terms = *as_terms(in.mask, in.query.scalar_type());
  const auto options = at::TensorOptions(at::kBool).device(in.query.device());
  const at::Tensor later = at::ones({in.query.size(-2), in.key.size(-2)}, options).triu(1);
  const ImplicitReplication own_tensor;
  return terms.masked_fill(later, -std::numeric_limits<double>::infinity());
}

// Returns the placements of the gradient of a replicated mask: each rank has a term of it.
Placements mask_gradient(const at::Tensor& mask, const Placements& query) {
  Placements out = placements_of(mask);
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (out[i].is_replicate() && !query[i].is_replicate()) out[i] = Partial();
  }
  return out;
}

bool records(const at::Tensor& t) { return at::GradMode::is_enabled() && t.requires_grad(); }

// Every rank computes attention on its pieces by `compute`, a function of plain Operands. The result has the query's
// memory order.
template <class Compute>
at::Tensor on_pieces(const Operands& in, const Compute& compute) {
  const bool recorded = records(in.query) || records(in.key) || records(in.value) || (in.masked() && records(*in.mask));
  const Spec& query = spec_of(in.query);
  const auto piece = [&](const at::Tensor& t, const std::optional<Placements>& gradient = std::nullopt) {
    detail::check_current(t, kName);
    return recorded ? to_local(t, gradient) : detail::meta(t).local();
  };
  const std::vector<int64_t> sizes = {in.query.size(0), in.query.size(1), in.query.size(2), in.value.size(3)};
  const bool as_query = sizes == query.sizes && is_row_major(query);
  const SpecPtr spec = as_query ? spec_ptr_of(in.query)
                                : intern_spec(query.mesh, query.placements, sizes,
                                              detail::attention_strides(sizes, in.query), query.dtype);
  at::Tensor result;
  query.mesh.world().guard(kName, [&] {
    const Optional mask =
        in.masked() ? Optional(piece(*in.mask, mask_gradient(*in.mask, query.placements))) : std::nullopt;
    const at::Tensor query_piece = piece(in.query), key = piece(in.key), value = piece(in.value);
    const at::Tensor local = compute(Operands{.query = query_piece, .key = key, .value = value, .mask = mask});
    result = as_dense(local, *spec);
  });
  if (!recorded) return detail::wrap(std::move(result), spec);
  return from_local(result, query.mesh, query.placements, {.shape = sizes, .stride = spec->strides});
}

// Returns whether attention with dropout runs on the pieces in blocks. Blocks have no formula for a mask's gradient nor
// for derivatives forward, and a probability of 1, or a tensor without elements, draws nothing.
bool fits_blocks(const Operands& in, double dropout, bool grouped) {
  if (!(dropout > 0 && dropout < 1) || !fits_pieces(in, grouped) || !at::isFloatingType(in.query.scalar_type()))
    return false;
  if (in.query.numel() == 0 || in.key.numel() == 0 || in.value.numel() == 0) return false;
  if (in.masked() && (records(*in.mask) || detail::has_tangent(*in.mask))) return false;
  return !detail::has_tangent(in.query) && !detail::has_tangent(in.key) && !detail::has_tangent(in.value);
}

// Computes attention with dropout on the pieces. It draws what at::dropout of the scores would draw.
at::Tensor in_blocks(const Operands& in, double dropout, bool causal, std::optional<double> scale) {
  const Spec& query = spec_of(in.query);
  const std::vector<int64_t> sizes = {in.query.size(0), in.query.size(1), in.query.size(2), in.key.size(2)};
  const detail::DroppedAttention options = {.probability = dropout,
                                            .causal = causal,
                                            .scale = scale,
                                            .key = detail::next_draw(query.mesh.world()),
                                            .scores = intern_spec(query.mesh, query.placements, sizes, query.dtype)};
  return on_pieces(in, [&](const Operands& local) {
    return detail::blocked_attention(local.query, local.key, local.value, local.mask.value_or(at::Tensor()), options);
  });
}

// With dropout, attention is computed in blocks, or written in other operators, as LibTorch does on a CPU: its GPU
// kernels draw random numbers that would depend on how the tensors are cut. Without dropout it runs on the pieces where
// that is possible.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Optional& mask,
                     double dropout, bool causal, std::optional<double> scale, bool grouped) {
  const Operands in{.query = query, .key = key, .value = value, .mask = mask};
  if (fits_blocks(in, dropout, grouped)) return in_blocks(in, dropout, causal, scale);
  if (causal && in.masked())
    return attention(query, key, value, with_triangle(in), dropout, /*causal=*/false, scale, grouped);
  if (dropout > 0) {
    return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, as_terms(mask, query.scalar_type()),
                                                              dropout, causal, std::nullopt, scale, grouped));
  }
  if (fits_pieces(in, grouped))
    return on_pieces(in, [&](const Operands& local) { return on_plain(local, causal, scale); });
  return at::compositeimplicitautograd::scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale,
                                                                     grouped);
}

// ---- the whole attention module in one operator, which torch.nn.MultiheadAttention calls where no gradient is asked
// for. It is written in other operators, so that a style's contracts and cut heads apply. Where a mask is true, nothing
// is attended to. Mask type 0 is for positions, type 1 for padded keys.

std::tuple<at::Tensor, at::Tensor> native_attention(const at::Tensor& query, const at::Tensor& key,
                                                    const at::Tensor& value, int64_t embed_dim, int64_t heads,
                                                    const at::Tensor& in_weight, const at::Tensor& in_bias,
                                                    const at::Tensor& out_weight, const at::Tensor& out_bias,
                                                    const Optional& mask, bool need_weights, bool average,
                                                    std::optional<int64_t> mask_type) {
  const std::vector<at::Tensor> weights = in_weight.chunk(3), biases = in_bias.chunk(3);
  const int64_t head_dim = embed_dim / heads;
  const auto project = [&](const at::Tensor& x, std::size_t i) {
    return at::linear(x, weights[i], biases[i]).unflatten(-1, {heads, head_dim}).transpose(1, 2);
  };
  const at::Tensor q = project(query, 0), k = project(key, 1), v = project(value, 2);
  at::Tensor scores = q.matmul(k.transpose(-2, -1)).div(std::sqrt(static_cast<double>(head_dim)));
  if (mask && mask->defined()) {
    const at::Tensor hidden = mask_type == 1 ? mask->unsqueeze(1).unsqueeze(1) : *mask;
    scores = scores.masked_fill(hidden.to(at::kBool), -std::numeric_limits<double>::infinity());
  }
  const at::Tensor attended = scores.softmax(-1);
  const at::Tensor out = at::linear(attended.matmul(v).transpose(1, 2).flatten(2), out_weight, out_bias);
  if (!need_weights) return {out, at::Tensor()};
  return {out, average ? attended.mean(1) : attended};
}

// Does the same where autograd is excluded.
bool native_attention_boxed(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  if (writes(op)) return false;
  const torch::jit::Stack a = take_args(op, stack);
  auto [out, weights] =
      native_attention(a[0].toTensor(), a[1].toTensor(), a[2].toTensor(), a[3].toInt(), a[4].toInt(), a[5].toTensor(),
                       a[6].toTensor(), a[7].toTensor(), a[8].toTensor(), a[9].toOptional<at::Tensor>(), a[10].toBool(),
                       a[11].toBool(), a[12].toOptional<int64_t>());
  give(op, stack, torch::jit::Stack{std::move(out), std::move(weights)});
  return true;
}
[[maybe_unused]] const bool kRegistered =
    register_decomposition("_native_multi_head_attention", native_attention_boxed);
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, m) { m.impl("_native_multi_head_attention", native_attention); }

void register_composites(torch::Library& m) {
  m.impl("scaled_dot_product_attention", attention);
  m.impl("_scaled_dot_product_attention_math", attention_math);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, m) { register_composites(m); }
TORCH_LIBRARY_IMPL(aten, PrivateUse3, m) { register_composites(m); }

}  // namespace
}  // namespace tessera
