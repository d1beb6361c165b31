#include <ATen/ATen.h>

#include "tessera/tests/operators/more_samples.h"
#include "tessera/tests/ops/rules/made_tensors.h"

namespace tessera::testing {
namespace {

using namespace made;

using Ints = std::vector<int64_t>;

c10::List<at::Tensor> list(const std::vector<at::Tensor>& tensors) { return c10::List<at::Tensor>(tensors); }

c10::List<std::optional<at::Tensor>> indices(const std::vector<at::Tensor>& tensors) {
  c10::List<std::optional<at::Tensor>> out;
  for (const at::Tensor& t : tensors) out.push_back(t.defined() ? std::make_optional(t) : std::nullopt);
  return out;
}

// Returns products of matrices in dtypes other than float64.
std::vector<Sample> products() {
  const at::Tensor a8 = (x({5, 16}) * 0.5).to(at::kFloat8_e4m3fn);
  const at::Tensor b8 = (x({16, 16}) * 0.5).to(at::kFloat8_e4m3fn).t();
  const at::Tensor one = at::ones({}, at::kFloat);
  const at::Tensor ends = at::tensor({2, 3, 6}, at::kInt);
  const auto f = [](const Ints& sizes) { return at::randn(sizes, at::kFloat); };
  return {
      {"aten::_scaled_mm", {a8, b8, one, one * 0.5, none(), none(), at::kFloat}},
      {"aten::_grouped_mm", {f({6, 8}), f({3, 8, 4}), ends}},
      {"aten::_grouped_mm", {f({3, 4, 8}), f({3, 8, 4})}},
      {"aten::einsum", {"ij,jk->ik", list({x({5, 3}), x({3, 4})})}},
      {"aten::einsum", {"bij,bkj->bik", list({x({5, 2, 3}), x({5, 4, 3})})}},
      {"aten::einsum", {"i,j", list({x({5}), x({3})})}},
      {"aten::einsum", {"ii->i", list({x({4, 4})})}},
      {"aten::einsum", {"ij,jk,kl->il", list({x({5, 3}), x({3, 4}), x({4, 2})})}},
      {"aten::einsum", {"...ij->...j", list({x({5, 2, 3})})}},
      {"aten::chain_matmul", {list({x({5, 3}), x({3, 4}), x({4, 2})})}},
  };
}

std::vector<Sample> algebra() {
  const at::Tensor a = x({5, 3, 3}) + 4 * at::eye(3, at::kDouble);
  const at::Tensor definite = a.matmul(a.mT());
  const auto [reflectors, tau] = at::geqrf(x({5, 4, 3}));
  const auto [lu, pivots, info] = at::linalg_lu_factor_ex(a);
  return {
      {"aten::linalg_cholesky", {definite}},
      {"aten::linalg_cond.p_str", {a, "fro"}},
      {"aten::linalg_matrix_norm", {a, 1}},
      {"aten::linalg_matrix_norm", {a, 2, Ints{-2, -1}, true}},
      {"aten::linalg_norm.ord_str", {a[0], "fro"}},
      {"aten::linalg_norm.ord_str", {a[0], "nuc", none(), true}},
      {"aten::linalg_solve_ex", {a, x({5, 3, 2})}},
      {"aten::linalg_tensorinv", {x({6, 2, 3}) + at::eye(6, at::kDouble).view({6, 2, 3}) * 4, 1}},
      {"aten::lu_solve", {x({5, 3, 2}), lu, pivots}},
      {"aten::orgqr", {reflectors, tau}},
      {"aten::matrix_exp_backward", {x({5, 3, 3}), x({5, 3, 3})}},
      {"aten::_linalg_check_errors", {at::zeros({5}, at::kInt), "linalg.inv", false}},
      {"aten::_pdist_backward", {x({10}), x({5, 3}), 2.0, at::pdist(x({5, 3}))}},
      {"aten::trace_backward", {x({}), Ints{5, 3}}},
  };
}

std::vector<Sample> indexing() {
  const at::Tensor mask = bools({5, 3});
  const at::Tensor fixed = at::arange(15).view({5, 3}).remainder(2) == 0;  // it selects 8 elements
  const at::Tensor some = ints({4, 2}, 3);
  return {
      {"aten::_index_put_impl", {x({5, 3}), indices({ints({4, 2}, 5)}), x({4, 2, 3}), true, false}},
      {"aten::_unsafe_masked_index", {x({5, 3}), bools({4, 2}), indices({ints({4, 2}, 5), some}), 0.5}},
      {"aten::_unsafe_masked_index_put_accumulate",
       {x({5, 3}), bools({4, 2}), indices({ints({4, 2}, 5), some}), x({4, 2})}},
      {"aten::index_fill.int_Tensor", {x({5, 3}), 1, at::tensor({2, 0}, at::kLong), x({})}},
      {"aten::index_select_backward", {x({7, 3}), Ints{5, 3}, 0, ints({7}, 5)}},
      {"aten::gather_backward", {x({5, 4}), x({5, 3}), 1, ints({5, 4}, 3), false}},
      {"aten::masked_scatter_backward", {x({5, 3}), fixed, Ints{4, 2}}},
      {"aten::masked_select_backward", {x({8}), x({5, 3}), fixed}},
      {"aten::value_selecting_reduction_backward", {x({5}), 1, ints({5}, 3), Ints{5, 3}, false}},
      {"aten::narrow.Tensor", {x({5, 6}), 1, at::scalar_tensor(2, at::kLong), 3}},
      {"aten::as_strided_scatter", {x({5, 3}), x({3}), Ints{3}, Ints{4}}},
      {"aten::meshgrid.indexing", {list({x({5}), x({3})}), "xy"}},
      {"aten::segment_reduce", {x({5, 3}), "sum", at::tensor({2, 0, 3}, at::kLong)}},
      {"aten::segment_reduce", {x({5, 3}), "max", none(), none(), at::tensor({0, 2, 5}, at::kLong)}},
      {"aten::_segment_reduce_backward", {x({3, 3}), x({3, 3}), x({5, 3}), "sum", at::tensor({2, 0, 3}, at::kLong)}},
      {"aten::_rowwise_prune", {x({5, 3}).to(at::kFloat), at::tensor({1, 0, 1, 1, 0}).to(at::kBool), at::kLong}},
      {"aten::_reshape_from_tensor", {x({4, 6}), at::tensor({8, 3}, at::kLong)}},
      {"aten::unflatten_dense_tensors", {x({23}), list({x({5, 3}), x({2, 4})})}},
  };
}

// Returns operators that round as quantized tensors would, by scales that are tensors.
std::vector<Sample> fake_quantization() {
  const at::Tensor a = x({5, 4}).to(at::kFloat), gradient = x({5, 4}).to(at::kFloat), kept = bools({5, 4});
  const at::Tensor scale = at::tensor({0.1, 0.2, 0.3, 0.4}, at::kFloat);
  const at::Tensor zero = at::tensor({0, 3, 1, 2}, at::kInt), learned = zero.to(at::kFloat);
  const at::Tensor one_scale = scale.narrow(0, 1, 1), one_zero = learned.narrow(0, 1, 1);
  return {
      {"aten::fake_quantize_per_channel_affine", {a, scale, zero, 1, 0, 7}},
      {"aten::fake_quantize_per_channel_affine_cachemask", {a, scale, zero, 1, 0, 7}},
      {"aten::fake_quantize_per_channel_affine_cachemask_backward", {gradient, kept}},
      {"aten::fake_quantize_per_tensor_affine_cachemask_backward", {gradient, kept}},
      {"aten::_fake_quantize_learnable_per_channel_affine", {a, scale, learned, 1, 0, 7, 1.0}},
      {"aten::_fake_quantize_learnable_per_channel_affine_backward", {gradient, a, scale, learned, 1, 0, 7, 1.0}},
      {"aten::_fake_quantize_learnable_per_tensor_affine_backward", {gradient, a, one_scale, one_zero, 0, 7, 1.0}},
  };
}

// Returns operators that draw for every element, in training.
std::vector<Sample> draws() {
  const at::Tensor a = x({5, 3});
  const at::Tensor image = x({5, 3, 2, 2});
  std::vector<Sample> out;
  for (const char* name : {"dropout", "alpha_dropout"}) {
    for (const char* form : {"", "_"}) out.push_back({std::string("aten::") + name + form, {a, 0.5, true}, true});
  }
  for (const char* name : {"feature_dropout", "feature_alpha_dropout"}) {
    for (const char* form : {"", "_"}) out.push_back({std::string("aten::") + name + form, {image, 0.5, true}, true});
  }
  const at::Tensor high = at::scalar_tensor(7, at::kLong);
  const std::vector<Sample> more = {
      {"aten::rrelu", {a, 0.1, 0.3, true}, true},
      {"aten::rrelu_", {a, 0.1, 0.3, true}, true},
      {"aten::rrelu_with_noise", {a, at::zeros_like(a), 0.1, 0.3, true}, true},
      {"aten::rrelu_with_noise_", {a, at::zeros_like(a), 0.1, 0.3, true}, true},
      {"aten::randint_like.Tensor", {a, high}, true},
      {"aten::randint_like.Tensor_out", {a, high, none(), at::empty_like(a)}, true},
      {"aten::randint_like.Tensor_generator", {a, high, none()}, true},
      {"aten::randint_like.Tensor_generator_out", {a, high, none(), none(), at::empty_like(a)}, true},
      {"aten::randint_like.low_dtype_out", {a, 1, 7, none(), at::empty_like(a)}, true},
      {"aten::randint_like.low_generator_dtype", {a, 1, 7, none()}, true},
      {"aten::randint_like.low_generator_dtype_out", {a, 1, 7, none(), none(), at::empty_like(a)}, true},
  };
  out.insert(out.end(), more.begin(), more.end());
  return out;
}

// Returns the operators that formulas of gradients call.
std::vector<Sample> derivatives() {
  const at::Tensor a = x({5, 3});
  return {
      {"aten::cummaxmin_backward", {x({5, 3}), a, std::get<1>(a.cummax(0)), 0}},
      {"aten::cumprod_backward", {x({5, 3}), a, 0, a.cumprod(0)}},
      {"aten::hardshrink_backward", {x({5, 3}), a, 0.5}},
      {"aten::softshrink_backward", {x({5, 3}), a, 0.5}},
      {"aten::infinitely_differentiable_gelu_backward", {x({5, 3}), a}},
      {"aten::rrelu_with_noise_backward", {x({5, 3}), a, at::rand({5, 3}, at::kDouble), 0.1, 0.3, true, false}},
  };
}

std::vector<Sample> others() {
  const at::Tensor a = x({5, 3});
  const at::Tensor edges = at::arange(4, at::kDouble) - 1.5;
  return {
      {"aten::clip.Tensor", {a, x({3})}},
      {"aten::clip_.Tensor", {a, none(), x({5, 3})}},
      {"aten::gradient.tensorarray", {a, list({at::arange(5, at::kDouble).square()}), Ints{0}}},
      {"aten::gradient.tensorarrayint", {a, list({at::arange(3, at::kDouble).square()}), 1}},
      {"aten::clone", {a}},
      {"aten::div.Tensor_mode", {a, x({3}), "floor"}},
      {"aten::div_.Tensor_mode", {a, x({3}), "trunc"}},
      {"aten::take_along_dim", {a, ints({5, 2}, 3), 1}},
      {"aten::take_along_dim", {a, ints({4}, 15)}},
      {"aten::tensor_split.tensor_indices_or_sections", {a, at::tensor({1, 2}, at::kLong), 0}},
      {"aten::hash_tensor", {a}},
      {"aten::hash_tensor", {a, Ints{1}}},
      {"aten::histogramdd.TensorList_bins", {x({5, 2}), list({edges, edges})}},
      {"aten::_histogramdd_from_bin_tensors", {x({5, 2}), list({edges, edges})}},
      {"aten::to.device", {a, c10::Device(at::kCPU), at::kFloat}},
      {"aten::_saturate_weight_to_fp16", {a.to(at::kFloat)}},
      {"aten::_sobol_engine_initialize_state_", {at::zeros({3, 30}, at::kLong), 3}},
      {"aten::_sobol_engine_scramble_", {ints({3, 30}, 9), at::tril(ints({3, 30, 30}, 2)), 3}},
      {"aten::_amp_foreach_non_finite_check_and_unscale",
       {list({at::rand({5, 3}), at::rand({4})}), at::zeros({1}), at::full({1}, 0.5)}},
      {"aten::_amp_foreach_non_finite_check_and_unscale",
       {list({at::rand({5, 3}), at::rand({4}) / at::tensor({1, 1, 1, 0})}), at::zeros({1}), at::full({1}, 0.5)}},
      {"aten::_amp_foreach_non_finite_check_and_unscale.out",
       {list({at::rand({5, 3}), at::rand({4})}), at::zeros({1}), at::full({1}, 0.5),
        list({at::empty({5, 3}), at::empty({4})})}},
      {"aten::_amp_update_scale_", {at::full({1}, 8.0), at::ones({1}, at::kInt), at::zeros({1}), 2.0, 0.5, 2}},
      {"aten::_amp_update_scale_", {at::full({1}, 8.0), at::ones({1}, at::kInt), at::ones({1}), 2.0, 0.5, 2}},
      {"aten::_amp_update_scale", {at::full({1}, 8.0), at::ones({1}, at::kInt), at::zeros({1}), 2.0, 0.5, 2}},
  };
}

}  // namespace

std::vector<Sample> step_samples() {
  std::vector<Sample> out;
  for (auto& more : {products(), algebra(), indexing(), draws(), derivatives(), others(), fake_quantization()})
    out.insert(out.end(), more.begin(), more.end());
  return out;
}

}  // namespace tessera::testing
