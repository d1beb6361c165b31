// This file has the kernels of tessera::orthogonal_, tessera::sparse_ and tessera::dirac_ (dtensor/init.h), and of eye.
// An element's value depends on its position in the global tensor.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/dtensor/random/draws.h"
#include "tessera/ops/kernels/arguments.h"
#include "tessera/ops/rules/labels.h"

namespace tessera {
namespace {

using detail::DrawKey;
using torch::jit::Stack;

constexpr const char* kOrthogonal = "orthogonal";
constexpr const char* kSparse = "sparse";
constexpr const char* kDirac = "dirac";

std::vector<int64_t> indices_of(const Intervals& part) {
  std::vector<int64_t> out;
  for (const Interval& interval : part) {
    for (int64_t i = interval.begin; i < interval.end; ++i) out.push_back(i);
  }
  return out;
}

// Returns this rank's columns of the matrix in which all dimensions but the first are merged.
std::vector<int64_t> columns_of(const Spec& spec) {
  std::vector<int64_t> out = {0};
  for (std::size_t dim = 1; dim < spec.sizes.size(); ++dim) {
    std::vector<int64_t> next;
    for (const int64_t before : out) {
      for (const int64_t i : indices_of(spec.tile[dim])) next.push_back(before * spec.sizes[dim] + i);
    }
    out = std::move(next);
  }
  return out;
}

// Returns which of this rank's elements are on the diagonal of the first two dimensions.
at::Tensor is_diagonal(const Spec& spec) {
  const at::Tensor rows = at::tensor(indices_of(spec.tile[0]), at::TensorOptions(at::kLong));
  const at::Tensor columns = at::tensor(indices_of(spec.tile[1]), at::TensorOptions(at::kLong));
  return rows.unsqueeze(1).eq(columns);
}

// Draws rows of a matrix [rows, size] that no rank holds.
class Rows {
 public:
  Rows(const Spec& like, int64_t rows, int64_t size, DrawKey key) : spec_(like), key_(key) {
    spec_.sizes = {rows, size};
  }

  // Draws row `row` from element `first` on.
  template <void (*Draw)(const at::Tensor&, const Spec&, DrawKey, double, double)>
  at::Tensor draw(int64_t row, int64_t first = 0) {
    spec_.tile = {{{row, row + 1}}, {{first, spec_.sizes[1]}}};
    const at::Tensor out = at::empty({1, spec_.sizes[1] - first}, at::TensorOptions(at::kDouble));
    Draw(out, spec_, key_, 0, 1);
    return out;
  }

 private:
  Spec spec_;
  DrawKey key_;
};

// ---- orthogonal_

// Adds in a fixed order, so that the sum does not depend on which other columns a rank holds.
double dot(const double* a, const double* b, int64_t n) {
  constexpr int64_t kLanes = 8;
  double sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (; i < n; ++i) sums[0] += a[i] * b[i];
  return std::accumulate(std::begin(sums), std::end(sums), 0.0);
}

// Returns columns of Q = H_0 H_1 .. H_(k-1) S, an n x k matrix of orthonormal columns. H_i reflects the coordinates
// from i on by a vector of normal numbers, and S has signs, so that Q is distributed as in the QR decomposition, with a
// positive diagonal of R, of a matrix of normal numbers.
at::Tensor columns_of_rotation(Rows& normals, int64_t n, const std::vector<int64_t>& which) {
  const auto count = static_cast<int64_t>(which.size());
  const at::Tensor out = at::zeros({count, n}, at::TensorOptions(at::kDouble));
  double* const q = out.data_ptr<double>();
  for (int64_t c = 0; c < count; ++c) q[c * n + which[static_cast<std::size_t>(c)]] = 1;
  for (int64_t i = which.back(); i >= 0; --i) {
    const at::Tensor drawn = normals.draw<detail::draw_normal>(i, i);
    double* const v = drawn.data_ptr<double>();
    const double sign = v[0] < 0 ? -1 : 1;
    v[0] += sign * std::sqrt(dot(v, v, n - i));
    const double scale = 2 / dot(v, v, n - i);
    at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        const int64_t column = which[static_cast<std::size_t>(c)];
        if (column < i) continue;
        double* const x = q + c * n + i;
        if (column == i) x[0] = -sign;
        const double factor = scale * dot(v, x, n - i);
        for (int64_t k = 0; k < n - i; ++k) x[k] -= factor * v[k];
      }
    });
  }
  return out;
}

void orthogonal(const LocalCall& call, Stack& stack) {
  const at::Tensor self = stack[0].toTensor();
  const double gain = stack[1].toDouble();
  stack = {self};
  if (self.numel() == 0) return;
  const Spec& spec = *call.outputs[0];
  const int64_t rows = spec.sizes[0], columns = spec.numel() / rows;
  // Q's columns are the tensor's columns or its rows, whichever are fewer.
  const bool tall = rows >= columns;
  const std::vector<int64_t> my_rows = indices_of(spec.tile[0]), my_columns = columns_of(spec);
  const std::vector<int64_t>& vectors = tall ? my_columns : my_rows;
  const std::vector<int64_t>& coordinates = tall ? my_rows : my_columns;
  const int64_t n = std::max(rows, columns), k = std::min(rows, columns);
  Rows normals(spec, k, n, call.draw);
  const at::Tensor at_coordinates = at::tensor(coordinates, at::TensorOptions(at::kLong));
  const at::Tensor flat = at::empty({static_cast<int64_t>(my_rows.size()), static_cast<int64_t>(my_columns.size())},
                                    at::TensorOptions(self.scalar_type()));
  const auto step = static_cast<std::size_t>(std::clamp<int64_t>(k / 8, 1, 128));
  for (std::size_t begin = 0; begin < vectors.size(); begin += step) {
    const std::vector<int64_t> some(
        vectors.begin() + static_cast<std::ptrdiff_t>(begin),
        vectors.begin() + static_cast<std::ptrdiff_t>(std::min(begin + step, vectors.size())));
    const at::Tensor made = columns_of_rotation(normals, n, some).index_select(1, at_coordinates).mul_(gain);
    flat.narrow(tall ? 1 : 0, static_cast<int64_t>(begin), made.size(0)).copy_(tall ? made.t() : made);
  }
  self.copy_(flat.view(self.sizes()));
}

// ---- sparse_

void sparse(const LocalCall& call, Stack& stack) {
  const at::Tensor self = stack[0].toTensor();
  const double sparsity = stack[1].toDouble(), deviation = stack[2].toDouble();
  stack = {self};
  if (self.numel() == 0) return;
  const Spec& spec = *call.outputs[0];
  detail::draw_normal(self, spec, call.draw, 0, deviation);
  const int64_t rows = spec.sizes[0];
  const auto zeros = static_cast<std::ptrdiff_t>(std::ceil(sparsity * static_cast<double>(rows)));
  Rows ranks(spec, spec.sizes[1], rows, {.seed = detail::seed_of(call.draw), .draw = 0});
  const std::vector<int64_t> my_rows = indices_of(spec.tile[0]), my_columns = indices_of(spec.tile[1]);
  const at::Tensor kept = at::empty(self.sizes(), at::TensorOptions(at::kBool));
  auto keep = kept.accessor<bool, 2>();
  std::vector<int64_t> order(static_cast<std::size_t>(rows));
  std::vector<bool> is_zero(order.size());
  for (std::size_t c = 0; c < my_columns.size(); ++c) {
    const at::Tensor drawn = ranks.draw<detail::draw_uniform>(my_columns[c]);
    const double* const rank = drawn.const_data_ptr<double>();
    std::iota(order.begin(), order.end(), 0);
    std::nth_element(order.begin(), order.begin() + std::min<std::ptrdiff_t>(zeros, rows - 1), order.end(),
                     [&](int64_t a, int64_t b) { return std::pair(rank[a], a) < std::pair(rank[b], b); });
    std::fill(is_zero.begin(), is_zero.end(), false);
    for (std::ptrdiff_t i = 0; i < zeros; ++i)
      is_zero[static_cast<std::size_t>(order[static_cast<std::size_t>(i)])] = true;
    for (std::size_t r = 0; r < my_rows.size(); ++r) {
      keep[static_cast<int64_t>(r)][static_cast<int64_t>(c)] = !is_zero[static_cast<std::size_t>(my_rows[r])];
    }
  }
  self.mul_(kept.to(self.device()));
}

// ---- dirac_

void dirac(const LocalCall& call, Stack& stack) {
  const at::Tensor self = stack[0].toTensor();
  stack = {self};
  const Spec& spec = *call.outputs[0];
  self.zero_();
  at::Tensor middle = self;  // the part of it at the middle of the dimensions after the channels
  for (std::size_t dim = 2; dim < spec.sizes.size(); ++dim) {
    const std::vector<int64_t> mine = indices_of(spec.tile[dim]);
    const auto at = std::find(mine.begin(), mine.end(), spec.sizes[dim] / 2);
    if (at == mine.end()) return;
    middle = middle.select(2, at - mine.begin());
  }
  middle.copy_(is_diagonal(spec));
}

// ---- eye

// Handles eye(n, m, out=), which torch::nn::init::eye_ calls. Each rank fills its piece.
bool eye(const c10::OperatorHandle& op, Stack& stack) {
  const Stack args = take_args(op, stack);
  const at::Tensor out = args.back().toTensor();
  if (detail::meta(out).is_copied_view()) return false;  // the dispatcher brings what it writes to the viewed tensor
  const Spec& spec = *detail::meta(out).spec;
  const std::vector<int64_t> wanted = {args[0].toInt(), args[args.size() - 2].toInt()};
  if (spec.partial || spec.sizes != wanted) return false;
  if (spec.mesh.is_member()) {
    const at::AutoDispatchBelowADInplaceOrView below;
    detail::meta(out).local().copy_(is_diagonal(spec));
    detail::meta(out).count_write();
  }
  give(op, stack, out);
  return true;
}

[[maybe_unused]] const bool kRegistered = register_local_kernel(kOrthogonal, orthogonal) &&
                                          register_local_kernel(kSparse, sparse) &&
                                          register_local_kernel(kDirac, dirac) && register_decomposition("eye", eye);

// ---- the operators; rules use their meta kernels

template <const char* const& Kernel>
rules::OpRule by_kernel(const rules::OpCall& call) {
  rules::OpRule rule = rules::plain(call);
  rule.kernel = Kernel;
  return rule;
}

[[maybe_unused]] const bool has_rules = [] {
  rules::register_rule("tessera::orthogonal_", by_kernel<kOrthogonal>);
  rules::register_rule("tessera::sparse_", by_kernel<kSparse>);
  rules::register_rule("tessera::dirac_", by_kernel<kDirac>);
  return true;
}();

at::Tensor& orthogonal_meta(at::Tensor& self, double) { return self; }
at::Tensor& dirac_meta(at::Tensor& self) { return self; }
at::Tensor& sparse_meta(at::Tensor& self, double, double) { return self; }

// Increments the version counter, by which autograd sees a write, as LibTorch's own operators that write do.
template <class... Numbers>
at::Tensor& counted(const char* name, c10::DispatchKeySet keys, at::Tensor& self, Numbers... numbers) {
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<at::Tensor&(at::Tensor&, Numbers...)>();
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatch(keys & c10::after_ADInplaceOrView_keyset, self, numbers...);
  }
  self.unsafeGetTensorImpl()->bump_version();
  return self;
}
at::Tensor& orthogonal_counted(c10::DispatchKeySet keys, at::Tensor& self, double gain) {
  return counted("tessera::orthogonal_", keys, self, gain);
}
at::Tensor& dirac_counted(c10::DispatchKeySet keys, at::Tensor& self) { return counted("tessera::dirac_", keys, self); }
at::Tensor& sparse_counted(c10::DispatchKeySet keys, at::Tensor& self, double sparsity, double deviation) {
  return counted("tessera::sparse_", keys, self, sparsity, deviation);
}

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("orthogonal_(Tensor(a!) self, float gain) -> Tensor(a!)", {at::Tag::nondeterministic_seeded});
  m.def("dirac_(Tensor(a!) self) -> Tensor(a!)");
  m.def("sparse_(Tensor(a!) self, float sparsity, float deviation) -> Tensor(a!)", {at::Tag::nondeterministic_seeded});
}
TORCH_LIBRARY_IMPL(tessera, ADInplaceOrView, m) {
  m.impl("orthogonal_", orthogonal_counted);
  m.impl("dirac_", dirac_counted);
  m.impl("sparse_", sparse_counted);
}
TORCH_LIBRARY_IMPL(tessera, Meta, m) {
  m.impl("orthogonal_", orthogonal_meta);
  m.impl("dirac_", dirac_meta);
  m.impl("sparse_", sparse_meta);
}

}  // namespace
}  // namespace tessera
