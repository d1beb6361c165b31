#include <algorithm>
#include <span>

#include <ATen/native/Pool.h>

#include "tessera/ops/rules/labels.h"
#include "tessera/ops/rules/signature.h"

// This file has the rules of operators that work on the last dimensions of each item of a batch: linear algebra,
// adaptive pooling, resampling, padding and Fourier transforms.
namespace tessera::rules {
namespace {

// ---- results of operators for which LibTorch has no meta kernel

using Results = std::vector<TensorInfo>;
using Sizes = std::vector<int64_t>;

// The results have the sizes and dtypes of these inputs.
template <std::size_t... inputs>
Results like(const OpCall& call) {
  return {call.inputs.at(inputs)...};
}

// The result has input 0's dtype and input 1's sizes.
Results picked(const OpCall& call) { return {{.sizes = call.inputs.at(1).sizes, .dtype = call.inputs[0].dtype}}; }

// Says whether the sizes before the last `a_rest` of one tensor are those before the last `b_rest` of the other.
bool leads_alike(const Sizes& a, std::ptrdiff_t a_rest, const Sizes& b, std::ptrdiff_t b_rest) {
  return std::ssize(a) >= a_rest && std::ssize(b) >= b_rest &&
         std::equal(a.begin(), a.end() - a_rest, b.begin(), b.end() - b_rest);
}

// The result is a matrix by reflections, which LibTorch does not broadcast.
template <std::size_t result>
Results reflected(const OpCall& call) {
  const Sizes& matrix = call.inputs.at(0).sizes;
  if (!leads_alike(matrix, 2, call.inputs.at(1).sizes, 1) || !leads_alike(matrix, 2, call.inputs.at(result).sizes, 2)) {
    return {};
  }
  return {call.inputs[result]};
}

// The result has positions in a sorted sequence.
template <std::size_t input>
Results places(const OpCall& call) {
  // LibTorch broadcasts a single sequence alone.
  const Sizes& sequences = call.inputs.at(0).sizes;
  if (input == 1 && sequences.size() > 1 && !leads_alike(sequences, 1, call.inputs.at(1).sizes, 1)) return {};
  if (call.has_arg("side") && call.arg("right").toBool() && !call.arg("side").isNone()) {
    if (call.arg("side").toStringRef() == "left") return {};  // LibTorch refuses both
  }
  return {{.sizes = call.inputs.at(input).sizes, .dtype = call.arg("out_int32").toBool() ? at::kInt : at::kLong}};
}

// The result has one bool per element, or a single bool if `element` is a number.
Results contained(const OpCall& call) {
  if (call.has_arg("element")) return {{.sizes = {}, .dtype = at::kBool}};
  return {{.sizes = call.inputs.at(0).sizes, .dtype = at::kBool}};
}

Results eigen(const OpCall& call) {
  TensorInfo vectors = call.inputs.at(0);
  vectors.dtype = c10::toComplexType(vectors.dtype);
  TensorInfo values = vectors;
  values.sizes.pop_back();
  if (call.schema.returns().size() == 1) return {values};
  return {values, vectors};
}

// Returns the input with `inner` as the sizes of its last dimensions.
TensorInfo resized(const TensorInfo& input, const Sizes& inner) {
  TensorInfo out = input;
  std::copy_backward(inner.begin(), inner.end(), out.sizes.end());
  return out;
}

// The result is a sum.
Results number(const OpCall& call) {
  const at::ScalarType type = call.inputs.at(0).dtype;
  return {{.sizes = {}, .dtype = at::isIntegralType(type, /*includeBool=*/true) ? at::kLong : type}};
}

// The result has one number per item if nothing is reduced, and a single number otherwise.
Results per_item(const OpCall& call) {
  const bool weighs = call.has_arg("weight") && call.inputs.back().defined;
  if (weighs && call.inputs.back().sizes != Sizes{call.inputs.at(0).sizes.back()}) return {};
  if (call.arg("reduction").toInt() != 0) return {{.sizes = {}, .dtype = call.inputs.at(0).dtype}};
  const Sizes& sizes = call.inputs.at(0).sizes;
  return {{.sizes = Sizes(sizes.begin(), sizes.end() - 1), .dtype = call.inputs[0].dtype}};
}

Results labelled(const OpCall& call) {
  Results out = per_item(call);
  out.push_back(call.inputs[0]);
  return out;
}

Results of_output_size(const OpCall& call) {
  const Sizes sizes = call.arg("output_size").toIntVector();
  if (sizes.size() > call.inputs.at(0).sizes.size()) return {};
  return {resized(call.inputs[0], sizes)};
}

Results unpooled(const OpCall& call) {
  return call.inputs.at(1).sizes == call.inputs.at(0).sizes ? of_output_size(call) : Results();
}

// The result is a batch of matrices; the batch sizes of inputs 0 and 1 broadcast.
Results matrices(const OpCall& call, int64_t rows, int64_t columns) {
  const auto leading = [](const Sizes& sizes) { return TensorInfo{.sizes = Sizes(sizes.begin(), sizes.end() - 2)}; };
  Sizes out = broadcast_sizes({leading(call.inputs.at(0).sizes), leading(call.inputs.at(1).sizes)});
  out.insert(out.end(), {rows, columns});
  return {{.sizes = std::move(out), .dtype = call.inputs[0].dtype}};
}

// The result has input 1's sizes. LibTorch's gradient has others where input 1 was expanded to the gradient's batch.
Results distances_backward(const OpCall& call) {
  const Sizes& grad = call.inputs.at(0).sizes;
  const Sizes& x = call.inputs.at(1).sizes;
  if (!leads_alike(grad, 2, x, 2)) return {};
  return {call.inputs[1]};
}

Results distances(const OpCall& call) {
  return matrices(call, call.inputs.at(0).sizes.end()[-2], call.inputs.at(1).sizes.end()[-2]);
}
Results solved(const OpCall& call) {
  const bool left = call.arg("left").toBool();
  const Sizes &matrix = call.inputs.at(0).sizes, &right = call.inputs.at(1).sizes;
  if (matrix.back() != right.end()[left ? -2 : -1]) return {};
  return matrices(call, call.inputs.at(1).sizes.end()[-2], call.inputs.at(1).sizes.end()[-1]);
}

Results sampled(const OpCall& call) {
  const Sizes& grid = call.inputs.at(1).sizes;
  if (grid.back() + 2 != call.inputs.at(0).ndim()) return {};
  return {resized(call.inputs.at(0), Sizes(grid.begin() + 1, grid.end() - 1))};
}

// Returns the gradients of input and grid that the call asks for.
Results sampled_backward(const OpCall& call) { return asked_for(call, like<1, 2>(call)); }

Results padded(const OpCall& call) {
  TensorInfo out = call.inputs.at(0);
  const Sizes amounts = call.arg("padding").toIntVector();
  if (amounts.size() > 2 * out.sizes.size()) return {};
  for (std::size_t i = 0; i < amounts.size(); ++i) out.sizes[out.sizes.size() - 1 - i / 2] += amounts[i];
  return {out};
}

// Returns how many windows fit into each of the last dimensions.
Sizes windows(const OpCall& call, const Sizes& inner) {
  const bool ceil = call.has_arg("ceil_mode") && call.arg("ceil_mode").toBool();
  Sizes out;
  for (std::size_t d = 0; d < inner.size(); ++d) {
    const int64_t kernel = at_dim(call, "kernel_size", d);
    out.push_back(at::native::pooling_output_shape<int64_t>(inner[d], kernel, at_dim(call, "padding", d),
                                                            at_dim(call, "stride", d, kernel),
                                                            at_dim(call, "dilation", d), ceil));
  }
  return out;
}

// Maps (..., c, h, w) to (..., c * elements of a window, windows).
Results columns(const OpCall& call) {
  TensorInfo out = call.inputs.at(0);
  int64_t count = 1;
  for (const int64_t n : windows(call, Sizes(out.sizes.end() - 2, out.sizes.end()))) count *= n;
  out.sizes.resize(out.sizes.size() - 2);
  out.sizes.back() *= at_dim(call, "kernel_size", 0) * at_dim(call, "kernel_size", 1);
  out.sizes.push_back(count);
  return {out};
}

Results from_columns(const OpCall& call) {
  TensorInfo out = call.inputs.at(0);
  const int64_t window = at_dim(call, "kernel_size", 0) * at_dim(call, "kernel_size", 1);
  if (window <= 0) return {};
  out.sizes.pop_back();
  out.sizes.back() /= window;
  const Sizes inner = call.arg("output_size").toIntVector();
  out.sizes.insert(out.sizes.end(), inner.begin(), inner.end());
  return {out};
}

constexpr auto kNone = Passes::kNothing;

// For these operators the memory order of an input decides what LibTorch's formulas need of the result, so it is kept.
constexpr SignatureEntry kAlgebra[] = {
    {"linalg_inv_ex", "*-- -> *--, *"},
    {"linalg_cholesky_ex", "*-- -> *--, *"},
    {"cholesky", "*-- -> *--", kNone, "", like<0>},
    {"cholesky_inverse", "*-- -> *--", kNone, "", like<0>},
    {"_cholesky_solve_helper", "*-k, *-- -> *-k", kNone, "", like<0>},
    {"_linalg_det", "*-- -> *, *--, *-"},
    {"_linalg_slogdet", "*-- -> *, *, *--, *-"},
    {"_linalg_svd", "*-- -> *--, *-, *-- | *-- -> -, *-, -"},
    {"_linalg_eigh", "*-- -> *-, *--"},
    {"linalg_eig", "*-- -> *-, *--", kNone, "", eigen},
    {"_linalg_eigvals", "*-- -> *-", kNone, "", eigen},
    {"linalg_qr", "*-- -> *--, *-- | *-- -> -, *--"},
    {"geqrf", "*-- -> *--, *-"},
    {"linalg_householder_product", "*--, *- -> *--", kNone, "", reflected<0>},
    {"ormqr", "*--, *-, *-- -> *--", kNone, "", reflected<2>},
    {"linalg_lu_factor_ex", "*-- -> *--, *-, *"},
    {"linalg_lu", "*-- -> *--, *--, *--"},
    {"linalg_lu_solve", "*--, *-, *-- -> *--"},
    {"lu_unpack", "*--, *- -> *--, *--, *--"},
    {"_linalg_solve_ex", "*--, *-- -> *--, *--, *-, * | *--, *- -> *-, *--, *-, *"},
    {"linalg_solve_triangular", "*--, *-- -> *--", kNone, "", solved},
    {"triangular_solve", "*--, *-- -> *--, *--"},
    {"linalg_ldl_factor_ex", "*-- -> *--, *-, *"},
    {"linalg_ldl_solve", "*--, *-, *-k -> *-k"},
    {"linalg_matrix_exp", "*-- -> *--", kNone, "", like<0>},
    // Inputs (..., p, m) and (..., r, m) give the distance of each vector to each.
    {"_cdist_forward", "*p-, *r- -> *pr", kNone, "", distances},
};

// These kernels assume that their inputs are contiguous.
constexpr SignatureEntry kDense[] = {
    {"_cdist_backward", "*pr, *p-, *r-, *pr -> *p-", Passes::kLinear, "", distances_backward},
    // These pool with windows that ops/rules/pooling.cpp does not cover. Means are linear. The gradient of a maximum
    // goes to one position.
    {"_adaptive_avg_pool2d", "*-- -> *--", Passes::kLinear, "", of_output_size},
    {"_adaptive_avg_pool3d", "*--- -> *---", Passes::kLinear, "", of_output_size},
    {"_adaptive_avg_pool2d_backward", "*--, *-- -> *--", Passes::kLinear, "", like<1>},
    {"_adaptive_avg_pool3d_backward", "*---, *--- -> *---", Passes::kLinear, "", like<1>},
    {"adaptive_max_pool2d", "*-- -> *--, *--"},
    {"adaptive_max_pool3d", "*--- -> *---, *---"},
    {"adaptive_max_pool2d_backward", "*--, *--, *-- -> *--", Passes::kLinear},
    {"adaptive_max_pool3d_backward", "*---, *---, *--- -> *---", Passes::kLinear},
    {"fractional_max_pool2d", "*--, *- -> *--, *--"},
    {"fractional_max_pool3d", "*---, *- -> *---, *---"},
    {"fractional_max_pool2d_backward", "*--, *--, *-- -> *--", Passes::kLinear, "", like<1>},
    {"fractional_max_pool3d_backward", "*---, *---, *--- -> *---", Passes::kLinear, "", like<1>},
    {"max_unpool2d", "*--, *-- -> *--", kNone, "", unpooled},
    {"max_unpool3d", "*---, *--- -> *---", kNone, "", unpooled},
    // These pad with elements of the tensor itself.
    {"reflection_pad1d", "*- -> *-", Passes::kMovement},
    {"reflection_pad2d", "*-- -> *--", Passes::kMovement, "", padded},
    {"reflection_pad3d", "*--- -> *---", Passes::kMovement},
    {"replication_pad1d", "*- -> *-", Passes::kMovement},
    {"replication_pad2d", "*-- -> *--", Passes::kMovement},
    {"replication_pad3d", "*--- -> *---", Passes::kMovement},
    {"reflection_pad1d_backward", "*-, *- -> *-", Passes::kLinear},
    {"reflection_pad2d_backward", "*--, *-- -> *--", Passes::kLinear, "", like<1>},
    {"reflection_pad3d_backward", "*---, *--- -> *---", Passes::kLinear},
    {"replication_pad1d_backward", "*-, *- -> *-", Passes::kLinear},
    {"replication_pad2d_backward", "*--, *-- -> *--", Passes::kLinear, "", like<1>},
    {"replication_pad3d_backward", "*---, *--- -> *---", Passes::kLinear, "", like<1>},
    // The weight has size 1 if all channels share it.
    {"_prelu_kernel_backward", "*, *, * -> *, *", kNone, "", like<1, 1>},
    // These copy windows or resample.
    {"im2col", "*--- -> *--", Passes::kMovement, "", columns},
    {"col2im", "*-- -> *---", Passes::kLinear, "", from_columns},
    {"pixel_shuffle", "*--- -> *---", Passes::kMovement},
    {"pixel_unshuffle", "*--- -> *---", Passes::kMovement},
    {"channel_shuffle", "n-hw -> n-hw | n~ -> n~", Passes::kMovement, "", like<0>},
    {"native_channel_shuffle", "n-hw -> n-hw | n~ -> n~", Passes::kMovement},
    {"grid_sampler_2d", "nc--, nhw- -> nchw", Passes::kLinear, "", sampled},
    {"grid_sampler_3d", "nc---, ndhw- -> ncdhw", Passes::kLinear, "", sampled},
    {"grid_sampler_2d_backward", "nchw, nc--, nhw- -> nc--, nhw-", kNone, "", sampled_backward},
    {"grid_sampler_3d_backward", "ncdhw, nc---, ndhw- -> nc---, ndhw-", kNone, "", sampled_backward},
    {"upsample_nearest1d", "nc- -> nc-", Passes::kMovement},
    {"upsample_nearest2d", "nc-- -> nc--", Passes::kMovement},
    {"upsample_nearest3d", "nc--- -> nc---", Passes::kMovement},
    {"_upsample_nearest_exact1d", "nc- -> nc-", Passes::kMovement},
    {"_upsample_nearest_exact2d", "nc-- -> nc--", Passes::kMovement},
    {"_upsample_nearest_exact3d", "nc--- -> nc---", Passes::kMovement},
    {"upsample_linear1d", "nc- -> nc-", Passes::kLinear},
    {"upsample_bilinear2d", "nc-- -> nc--", Passes::kLinear},
    {"upsample_bicubic2d", "nc-- -> nc--", Passes::kLinear},
    {"upsample_trilinear3d", "nc--- -> nc---", Passes::kLinear},
    {"_upsample_bilinear2d_aa", "nc-- -> nc--", Passes::kLinear},
    {"_upsample_bicubic2d_aa", "nc-- -> nc--", Passes::kLinear},
    {"upsample_nearest1d_backward", "nc- -> nc-", Passes::kLinear, "input_size"},
    {"upsample_nearest2d_backward", "nc-- -> nc--", Passes::kLinear, "input_size"},
    {"upsample_nearest3d_backward", "nc--- -> nc---", Passes::kLinear, "input_size"},
    {"_upsample_nearest_exact1d_backward", "nc- -> nc-", Passes::kLinear, "input_size"},
    {"_upsample_nearest_exact2d_backward", "nc-- -> nc--", Passes::kLinear, "input_size"},
    {"_upsample_nearest_exact3d_backward", "nc--- -> nc---", Passes::kLinear, "input_size"},
    {"upsample_linear1d_backward", "nc- -> nc-", Passes::kLinear, "input_size"},
    {"upsample_bilinear2d_backward", "nc-- -> nc--", Passes::kLinear, "input_size"},
    {"upsample_bicubic2d_backward", "nc-- -> nc--", Passes::kLinear, "input_size"},
    {"upsample_trilinear3d_backward", "nc--- -> nc---", Passes::kLinear, "input_size"},
    {"_upsample_bilinear2d_aa_backward", "nc-- -> nc--", Passes::kLinear, "input_size"},
    {"_upsample_bicubic2d_aa_backward", "nc-- -> nc--", Passes::kLinear, "input_size"},
    {"trace", "-- -> ", Passes::kLinear, "", number},
    // These are losses per item; ops/kernels/decompositions.cpp reduces them.
    {"multi_margin_loss", "n-, n, - -> n", kNone, "", per_item},
    {"multi_margin_loss_backward", "n, n-, n, - -> n-", Passes::kLinear, "", like<1>},
    {"multilabel_margin_loss_forward", "n-, n- -> n, n-", kNone, "", labelled},
    {"multilabel_margin_loss_backward", "n, n-, n-, n- -> n-", Passes::kLinear, "", like<1>},
    // These find positions in a sorted sequence, or membership.
    {"bucketize", "*, - -> *", kNone, "", places<0>},
    {"searchsorted", "-, *, - -> * | *-, *m, *- -> *m", kNone, "", places<1>},
    {"isin", "*, ~ -> * | ~ -> | * -> *", kNone, "", contained},
    {"take", "~, * -> *", Passes::kMovement, "", picked},
};

const SignatureEntry* entry_of(std::span<const SignatureEntry> table, const OpCall& call) {
  const std::string key = rule_key(call.schema.name());
  const auto found =
      std::find_if(table.begin(), table.end(), [&](const SignatureEntry& entry) { return entry.name == key; });
  return found == table.end() ? nullptr : &*found;
}

// Names linear equations whose right hand side may be pending although it is not the first input; `right` is its index.
struct Equation {
  std::string_view name;
  std::size_t right;
};
constexpr Equation kEquations[] = {
    {"_cholesky_solve_helper", 0}, {"_linalg_solve_ex", 1},        {"linalg_ldl_solve", 2},
    {"linalg_lu_solve", 2},        {"linalg_solve_triangular", 1},
};

// Adds a strategy with `solution` as the placement of result 0. The other results depend on the matrix alone.
void add_solution(OpRule& rule, const OpCall& call, Strategy strategy, const Placement& solution) {
  strategy.outputs = Placements(num_outputs(call), Replicate());
  strategy.outputs[0] = solution;
  rule.strategies.push_back(std::move(strategy));
}

// Each column of the right hand side has its own solution. Terms of the right hand side give terms of the solution.
void add_equations(OpRule& rule, const OpCall& call, std::size_t right) {
  const Strategy whole{.inputs = Placements(call.inputs.size(), Replicate()), .outputs = {}};
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
    Strategy pending = whole;
    pending.inputs[right] = Partial(op);
    add_solution(rule, call, pending, Partial(op));
  }
  if (!call.has_arg("left") || !call.arg("left").toBool()) return;
  const int64_t ndim = rule.outputs.at(0).ndim();
  const bool is_vector = rule_key(call.schema.name()) == "_linalg_solve_ex" && ndim < call.inputs[0].ndim();
  if (is_vector || call.inputs[right].ndim() < 2) return;
  Strategy columns = whole;
  columns.inputs[right] = Shard(call.inputs[right].ndim() - 1);
  add_solution(rule, call, columns, Shard(ndim - 1));
}

// An input that is read for its sizes alone may stay pending, whether the gradient is replicated or pending.
void add_unread(OpRule& rule, std::size_t input) {
  for (const ReduceOp op : kPlainReductions) {
    Strategy strategy = pass_partial(2, 1, {input}, op);
    strategy.outputs = {Replicate()};
    rule.strategies.push_back(std::move(strategy));
  }
  add_linear(rule, 2, 1, {{0, input}});
}

// LibTorch takes a right-hand side that has a dimension less than the matrices for vectors if it has the sizes of their
// batch and rows. One that has others is broadcast, and a piece of it, or beside a piece of the matrices, may have
// them.
bool may_become_vectors(const OpCall& call) {
  const Sizes& matrix = call.inputs.at(0).sizes;
  const Sizes& right = call.inputs.at(1).sizes;
  return right.size() + 1 == matrix.size() && !std::equal(right.begin(), right.end(), matrix.begin());
}

OpRule by_signature(const OpCall& call) {
  const std::string key = rule_key(call.schema.name());
  if (const SignatureEntry* entry = entry_of(kAlgebra, call)) {
    OpRule rule = rule_of(*entry, call);
    if (key == "_linalg_solve_ex" && may_become_vectors(call)) {
      rule.strategies.clear();  // it runs on whole tensors
      return rule;
    }
    const auto* const found = std::ranges::find(kEquations, key, &Equation::name);
    if (!rule.declines && found != std::end(kEquations)) add_equations(rule, call, found->right);
    return rule;
  }
  OpRule rule = rule_of(*entry_of(kDense, call), call);
  if (rule.declines) return rule;
  rule.kernel = "contiguous";
  if (key.find("_pad") != std::string::npos && key.ends_with("_backward")) add_unread(rule, 1);
  return rule;
}

// Fourier transforms are linear, and the dimensions that they do not transform may be cut freely.
OpRule fourier(const OpCall& call) {
  const int64_t ndim = call.inputs.at(0).ndim();
  if (call.dims("dim", ndim).empty() || ndim == 0) return no_rule();
  const Labels labels = with_whole(letters(static_cast<std::size_t>(ndim)), call.dims("dim", ndim));
  OpRule rule{.strategies = shard_factors({labels}, {labels})};
  TensorInfo out = call.inputs[0];
  const auto last = static_cast<std::size_t>(call.dims("dim", ndim).back());
  if (call.has_arg("onesided")) {
    out.dtype = c10::toComplexType(out.dtype);
    if (call.arg("onesided").toBool()) out.sizes[last] = out.sizes[last] / 2 + 1;
  } else if (call.has_arg("last_dim_size")) {
    out.dtype = c10::toRealValueType(out.dtype);
    out.sizes[last] = call.arg("last_dim_size").toInt();
  }
  rule.outputs = {out};
  add_linear(rule, 1, 1, {{0}});
  return rule;
}

std::vector<RuleEntry> make_table() {
  std::vector<RuleEntry> table;
  for (const SignatureEntry& entry : kAlgebra) table.push_back({entry.name, by_signature});
  for (const SignatureEntry& entry : kDense) table.push_back({entry.name, by_signature});
  for (const std::string_view name : {"_fft_r2c", "_fft_c2r", "_fft_c2c"}) table.push_back({name, fourier});
  return table;
}

}  // namespace

std::span<const RuleEntry> batched_rules() {
  static const std::vector<RuleEntry> table = make_table();
  return table;
}

}  // namespace tessera::rules
