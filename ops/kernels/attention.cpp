// Handles scaled_dot_product_attention on DTensors, before LibTorch picks a kernel.

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ExpandUtils.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_attention_math_native.h>
#include <ATen/ops/add.h>
#include <ATen/ops/logical_not.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/scaled_dot_product_attention_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/library.h>

#include "tessera/dtensor/core/memory_order.h"
#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dispatch/gather.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random/draws.h"
#include "tessera/dtensor/tangent.h"
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

// Returns whether the mask broadcasts to the scores. An error of LibTorch's on the pieces would fail the job.
bool mask_expands(const Operands& in) {
  const std::vector<int64_t> scores = {in.query.size(0), in.query.size(1), in.query.size(2), in.key.size(2)};
  return at::is_expandable_to(in.mask->sizes(), scores);
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
  if (!at::isFloatingType(in.query.scalar_type())) return false;
  if (in.key.size(1) != in.value.size(1) || (!grouped && in.key.size(1) != in.query.size(1))) return false;
  if (in.masked() && !mask_expands(in)) return false;
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
  if (in.query.size(0) * in.query.size(1) > 0) {
    Optional mask = in.mask;
    // LibTorch's kernels for GPUs take no mask of float beside 16-bit numbers.
    if (in.masked() && !in.query.is_cpu() && mask->scalar_type() != at::kBool) mask = mask->to(in.query.scalar_type());
    return at::scaled_dot_product_attention(in.query, in.key, in.value, mask, 0, causal, scale, grouped);
  }
  if (grouped) {
    const int64_t heads = in.query.size(1) / in.key.size(1);
    const at::Tensor key = in.key.repeat_interleave(heads, 1), value = in.value.repeat_interleave(heads, 1);
    return on_plain({in.query, key, value, in.mask}, causal, scale);
  }
  at::Tensor scores = at::matmul(in.query, in.key.transpose(-2, -1));
  if (in.masked()) scores = at::add(scores, as_terms(in.mask, scores.scalar_type())->to(scores.scalar_type()));
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

bool any_tangent(const Operands& in) {
  const bool may = detail::may_have_tangent(in.query) || detail::may_have_tangent(in.key) ||
                   detail::may_have_tangent(in.value) || (in.masked() && detail::may_have_tangent(*in.mask));
  if (!may || !detail::in_forward_mode()) return false;
  return detail::has_tangent(in.query) || detail::has_tangent(in.key) || detail::has_tangent(in.value) ||
         (in.masked() && detail::has_tangent(*in.mask));
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
  if (!(dropout > 0 && dropout < 1) || !fits_pieces(in, grouped)) return false;
  if (in.query.numel() == 0 || in.key.numel() == 0 || in.value.numel() == 0) return false;
  return !any_tangent(in) && !(in.masked() && records(*in.mask));
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

// Returns the layout of `t`, one of the other tensors, that is cut as the query is: along items and heads, of which one
// of the keys may serve a group of the query's; a mask where its dimension is not broadcast. Returns nullopt where
// slicing what a rank has does not give it.
std::optional<Placements> cuts_of_query(const at::Tensor& t, const at::Tensor& query, bool is_mask) {
  Placements to = placements_of(t);
  int64_t parts = 1;  // of the heads
  for (std::size_t i = 0; i < to.size(); ++i) {
    const Placement& cut = placements_of(query)[i];
    if (cut.is_replicate() && to[i].is_replicate()) continue;
    if (!(cut == Shard(0) || cut == Shard(1))) return std::nullopt;
    const int64_t dim = cut.tensor_dim(), own = dim - (4 - t.dim());
    if (is_mask && (own < 0 || t.size(own) == 1)) {
      if (!to[i].is_replicate()) return std::nullopt;
      continue;
    }
    if (dim == 1) parts *= mesh_of(t).size(static_cast<int64_t>(i));
    const int64_t here = t.size(own), there = query.size(dim);
    const bool groups = !is_mask && dim == 1 && here > 0 && there % here == 0 && here % parts == 0;
    if (here != there && !groups) return std::nullopt;
    if (!to[i].is_replicate() && !(to[i] == Shard(own))) return std::nullopt;
    // A mesh dimension on the right would have cut first.
    const auto right = std::span(placements_of(t)).subspan(i + 1);
    if (to[i].is_replicate() && std::ranges::any_of(right, [&](const Placement& p) { return p.is_shard(own); }))
      return std::nullopt;
    to[i] = Shard(own);
  }
  return to;
}

// Returns the part of `t` in that layout, or nullopt where `t` stays as it is. Nothing is sent for that, and the
// gradient stays cut. A mask's gradient would have terms to be reduced, which autograd adds up before: such a mask
// stays.
Optional cut_as_query(const at::Tensor& t, const at::Tensor& query, bool is_mask) {
  if (!is_dtensor(t)) return std::nullopt;
  const Spec& own = spec_of(t);
  const Spec& other = spec_of(query);
  if (!is_mask && own.placements == other.placements) return std::nullopt;
  if (!(own.mesh == other.mesh) || !own.mesh.is_member()) return std::nullopt;
  if (is_mask ? t.dim() > 4 || records(t) : t.dim() != 4) return std::nullopt;
  if (dispatch::is_gathered(detail::meta(t))) return std::nullopt;
  const std::optional<Placements> to = cuts_of_query(t, query, is_mask);
  if (!to || *to == own.placements) return std::nullopt;
  return redistribute(t, *to, {.grad_placements = *to});
}

// Returns the mask with one element of each dimension that repeats it, as expand() makes them: from_local would write
// the repeats out, and a dimension of one element stands for all.
at::Tensor without_repeats(at::Tensor mask) {
  for (int64_t d = 0; d < mask.dim(); ++d) {
    if (mask.stride(d) == 0 && mask.size(d) > 1) mask = mask.narrow(d, 0, 1);
  }
  return mask;
}

// Returns the mask as a DTensor that is cut beside the query, or nullopt where it stays as it is. Under
// ImplicitReplication a plain mask counts as the same on every rank.
Optional mask_beside(const at::Tensor& mask, const at::Tensor& query) {
  if (is_dtensor(mask)) return cut_as_query(mask, query, /*is_mask=*/true);
  const DeviceMesh& mesh = mesh_of(query);
  const bool counts = ImplicitReplication::enabled() && mask.dim() > 0 && mask.layout() == at::kStrided &&
                      mask.device() == mesh.device() && mesh.is_member() && !records(mask);
  if (!counts) return std::nullopt;
  const Placements replicated(static_cast<std::size_t>(mesh.ndim()), Replicate());
  const at::Tensor whole = from_local(without_repeats(mask), mesh, replicated);
  return cut_as_query(whole, query, /*is_mask=*/true).value_or(whole);
}

// With dropout, attention is computed in blocks, or written in other operators, as LibTorch does on a CPU: its GPU
// kernels draw random numbers that would depend on how the tensors are cut. So it is in forward mode, for which the
// kernels have no formula. Without dropout it runs on the pieces where that is possible.
at::Tensor attention_of(const Operands& in, double dropout, bool causal, std::optional<double> scale, bool grouped) {
  const auto& [query, key, value, mask] = in;
  if (fits_blocks(in, dropout, grouped)) return in_blocks(in, dropout, causal, scale);
  if (causal && in.masked()) {
    const Optional both = with_triangle(in);
    return attention_of({.query = query, .key = key, .value = value, .mask = both}, dropout, /*causal=*/false, scale,
                        grouped);
  }
  if (dropout > 0 || any_tangent(in)) {
    return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, as_terms(mask, query.scalar_type()),
                                                              dropout, causal, std::nullopt, scale, grouped));
  }
  if (fits_pieces(in, grouped))
    return on_pieces(in, [&](const Operands& local) { return on_plain(local, causal, scale); });
  return at::compositeimplicitautograd::scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale,
                                                                     grouped);
}

// Throws what LibTorch throws before it picks a kernel.
void check_arguments(const at::Tensor& query, const Optional& mask, double dropout) {
  if (!(dropout >= 0 && dropout <= 1)) {
    throw std::invalid_argument(
        fmt::format("scaled_dot_product_attention: dropout_p is {}; give a probability from 0 to 1", dropout));
  }
  if (!mask || !mask->defined()) return;
  const at::ScalarType type = mask->scalar_type();
  if (type == at::kBool || type == at::kFloat || type == query.scalar_type()) return;
  throw std::invalid_argument(fmt::format(
      "scaled_dot_product_attention: the mask is of {}, the query of {}; give a mask of bool, of float or of "
      "the query's dtype",
      c10::toString(type), c10::toString(query.scalar_type())));
}

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Optional& mask,
                     double dropout, bool causal, std::optional<double> scale, bool grouped) {
  check_arguments(query, mask, dropout);
  Optional cut_key, cut_value, cut_mask;
  const bool masked = mask && mask->defined();
  const auto spec = [](const at::Tensor& t) { return is_dtensor(t) ? detail::meta(t).spec.get() : nullptr; };
  const bool alike = spec(key) == spec(query) && spec(value) == spec(query);  // as in most calls
  if (is_dtensor(query) && query.dim() == 4 && (masked || !alike)) {
    cut_key = cut_as_query(key, query, /*is_mask=*/false);
    cut_value = cut_as_query(value, query, /*is_mask=*/false);
    if (masked) cut_mask = mask_beside(*mask, query);
  }
  const Operands in{.query = query,
                    .key = cut_key ? *cut_key : key,
                    .value = cut_value ? *cut_value : value,
                    .mask = cut_mask ? cut_mask : mask};
  return attention_of(in, dropout, causal, scale, grouped);
}

void register_composites(torch::Library& m) {
  m.impl("scaled_dot_product_attention", attention);
  m.impl("_scaled_dot_product_attention_math", attention_math);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, m) { register_composites(m); }
TORCH_LIBRARY_IMPL(aten, PrivateUse3, m) { register_composites(m); }

}  // namespace
}  // namespace tessera
