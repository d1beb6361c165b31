#include "tessera/tests/ops/rules/samples.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include "tessera/tests/ops/rules/made_tensors.h"

namespace tessera::testing {
namespace {

using namespace made;

using Ints = std::vector<int64_t>;

// The library's own products are in another folder; here they are plain functions.
at::Tensor dense_wgrad(const at::Tensor& a, const at::Tensor& g) { return a.flatten(0, -2).t().mm(g.flatten(0, -2)); }

TORCH_LIBRARY_FRAGMENT(tessera_rules_test, m) {
  m.def("dense(Tensor x, Tensor w) -> Tensor",
        [](const at::Tensor& a, const at::Tensor& w) { return at::matmul(a, w); });
  m.def("dense_bias(Tensor x, Tensor w, Tensor bias) -> Tensor",
        [](const at::Tensor& a, const at::Tensor& w, const at::Tensor& bias) { return at::matmul(a, w) + bias; });
  m.def("dense_wgrad(Tensor x, Tensor g) -> Tensor", dense_wgrad);
  m.def("batched_matmul(Tensor a, Tensor b) -> Tensor",
        [](const at::Tensor& a, const at::Tensor& b) { return at::matmul(a, b); });
}

}  // namespace

std::vector<Sample> view_samples() {
  const at::Tensor half = x({4, 3, 2});
  return {
      {"aten::view", {x({4, 6}), Ints{24}}},
      {"aten::view", {x({24}), Ints{4, 6}}},
      {"aten::view", {x({3, 8}), Ints{3, 4, 2}}},
      {"aten::view", {x({2, 12, 5}), Ints{2, 3, 20}}},
      {"aten::view", {x({1, 5, 6}), Ints{1, 5, 2, 3}}},
      {"aten::view", {x({2, 3, 4}), Ints{6, 4}}},
      {"aten::view", {x({6, 4}), Ints{2, 3, 4}}},
      {"aten::view", {x({5, 1}), Ints{5}}},
      {"aten::view", {x({4, 6}), Ints{-1, 3}}},
      {"aten::view", {x({0, 4}), Ints{0, 2, 2}}},
      {"aten::view.dtype", {x({5, 4}), at::kLong}, true},
      {"aten::view.dtype", {x({5, 4}), at::kFloat}, true},
      {"aten::_unsafe_view", {x({4, 6}), Ints{4, 3, 2}}},
      {"aten::_reshape_alias", {x({4, 6}), Ints{4, 3, 2}, Ints{6, 2, 1}}},
      {"aten::_reshape_copy", {x({4, 6}), Ints{4, 3, 2}}},
      {"aten::view_copy", {x({4, 6}), Ints{4, 3, 2}}},
      {"aten::expand", {x({5, 1, 3}), Ints{5, 4, 3}}},
      {"aten::expand", {x({5, 1}), Ints{2, -1, 3}}},
      {"aten::expand_copy", {x({5, 1}), Ints{5, 3}}},
      {"aten::permute", {x({5, 4, 3}), Ints{2, 0, -2}}},
      {"aten::permute_copy", {x({5, 4, 3}), Ints{2, 0, 1}}},
      {"aten::transpose.int", {x({5, 4, 3}), 0, -1}},
      {"aten::transpose_copy.int", {x({5, 4, 3}), 0, -1}},
      {"aten::t", {x({5, 3})}},
      {"aten::t", {x({5})}},
      {"aten::t_copy", {x({5, 3})}},
      {"aten::squeeze", {x({2, 1, 5})}},
      {"aten::squeeze.dim", {x({2, 1, 5}), 1}},
      {"aten::squeeze.dim", {x({2, 1, 5}), 0}},
      {"aten::squeeze.dims", {x({2, 1, 5, 1}), Ints{0, 1, -1}}},
      {"aten::unsqueeze", {x({5, 3}), -1}},
      {"aten::unsqueeze_copy", {x({5, 3}), 1}},
      {"aten::view_as_real", {at::complex(half, -half)}},
      {"aten::view_as_complex", {half}},
      {"aten::slice.Tensor", {x({5, 6}), 1, 1, 5, 2}},
      {"aten::slice.Tensor", {x({5, 6}), 0, 0, 9223372036854775807}},
      {"aten::slice.Tensor", {x({5, 6}), 0, -5, 5}},
      {"aten::select.int", {x({5, 4, 3}), 1, -1}},
      {"aten::split.Tensor", {x({5, 4}), 2, 0}},
      {"aten::split_with_sizes", {x({5, 4}), Ints{1, 3}, -1}},
      {"aten::unsafe_split.Tensor", {x({5, 4}), 2, 0}},
      {"aten::unsafe_split_with_sizes", {x({5, 4}), Ints{1, 3}, -1}},
      {"aten::unbind.int", {x({5, 3}), 1}},
      {"aten::flip", {x({5, 3, 2}), Ints{1}}},
      {"aten::roll", {x({5, 3}), Ints{2}, Ints{1}}},
      {"aten::roll", {x({5, 3}), Ints{2}}},
      {"aten::diagonal", {x({5, 3, 4}), 1, 0, -1}},
      {"aten::unfold", {x({5, 6}), 1, 3, 2}},
      {"aten::select_backward", {x({5, 3}), Ints{5, 4, 3}, 1, -1}},
      {"aten::slice_backward", {x({5, 2}), Ints{5, 6}, 1, 1, 5, 2}},
      {"aten::slice_backward", {x({5, 6}), Ints{5, 6}, 1, 0, 6, 1}},
      {"aten::diagonal_backward", {x({2, 3}), Ints{5, 3, 2}, 1, 1, 0}},
      {"aten::diagonal", {x({6, 6}), -1, 0, 1}},
      {"aten::diagonal_backward", {x({5}), Ints{6, 6}, -1, 0, 1}},
      {"aten::unfold_backward", {x({5, 2, 3}), Ints{5, 6}, 1, 3, 2}},
      {"aten::slice_copy.Tensor", {x({5, 6}), 1, 1, 5, 2}},
      {"aten::narrow_copy", {x({5, 6}), 1, -4, 3}},
      {"aten::narrow_copy", {at::arange(15, at::kDouble).view({5, 3}), 0, 0, 5}},
      {"aten::select_copy.int", {x({5, 4, 3}), 1, -1}},
      {"aten::split_copy.Tensor", {x({5, 4}), 2, 0}},
      {"aten::split_with_sizes_copy", {x({5, 4}), Ints{1, 3}, -1}},
      {"aten::unbind_copy.int", {x({5, 3}), 1}},
      {"aten::squeeze_copy", {x({2, 1, 5})}},
      {"aten::squeeze_copy.dim", {x({2, 1, 5}), 1}},
      {"aten::diagonal_copy", {x({5, 3, 4}), 1, 0, -1}},
      {"aten::unfold_copy", {x({5, 6}), 1, 3, 2}},
      {"aten::_reshape_alias_copy", {x({4, 6}), Ints{4, 3, 2}, Ints{6, 2, 1}}},
      {"aten::view_as_real_copy", {at::complex(half, -half)}},
      {"aten::view_as_complex_copy", {half}},
  };
}

std::vector<Sample> reduction_samples() {
  const at::Tensor small = at::randint(1, 4, {5, 3}, at::kLong);
  return {
      {"aten::sum", {x({5, 3})}},
      {"aten::sum", {bools({5, 3})}},
      {"aten::sum.dim_IntList", {x({5, 3, 4}), Ints{-1, 0}, true}},
      {"aten::sum.dim_IntList", {ints({5, 3}, 9).to(at::kInt), Ints{0}}},
      {"aten::sum.dim_IntList", {x({5, 3}), none()}},
      {"aten::sum.dim_IntList", {x({5, 3}), Ints{}, false, at::kFloat}},
      {"aten::sum.dim_IntList", {x({}), Ints{-1}}},
      {"aten::nansum", {x({5, 3}), Ints{0}}},
      {"aten::linalg__powsum", {x({5, 3}), 3}},
      {"aten::linalg__powsum", {x({5, 3}), 2, Ints{1}, true}},
      {"aten::histc", {x({5, 3}), 4, -1.0, 1.0}},
      {"aten::histc", {x({5, 3}), 4}},
      {"aten::linalg_cross", {x({5, 3}), x({5, 3})}},
      {"aten::linalg_cross", {x({5, 3, 2}), x({1, 3, 2}), 1}},
      {"aten::count_nonzero", {ints({5, 3}, 2), 0}},
      {"aten::count_nonzero.dim_IntList", {ints({5, 3}, 2), Ints{0, 1}}},
      {"aten::mean", {x({5, 3})}},
      {"aten::mean.dim", {x({5, 3, 2}), Ints{0, -1}, true}},
      {"aten::mean.dim", {x({5, 3}), Ints{1}}},
      {"aten::prod", {x({5, 3})}},
      {"aten::prod.dim_int", {x({5, 3}), 0, true}},
      {"aten::prod.dim_int", {small, 0}},
      {"aten::amax", {x({5, 3}), Ints{0}}},
      {"aten::amax", {x({5, 3})}},
      {"aten::amin", {x({5, 3}), Ints{-1}, true}},
      {"aten::max", {x({5, 3})}},
      {"aten::max.dim", {x({5, 3}), 0, true}},
      {"aten::min", {x({5, 3})}},
      {"aten::min.dim", {x({5, 3}), -1}},
      {"aten::any", {bools({5, 3})}},
      {"aten::any.dim", {bools({5, 3}), 0}},
      {"aten::any.dims", {bools({5, 3}), Ints{0, 1}, true}},
      {"aten::any.dims", {bools({5, 3}), Ints{}}},
      {"aten::all", {bools({5, 3})}},
      {"aten::all.dim", {bools({5, 3}), 1, true}},
      {"aten::all.dims", {bools({5, 3})}},
      {"aten::argmax", {x({5, 3})}},
      {"aten::argmax", {x({5, 3}), 1, true}},
      {"aten::argmin", {x({5, 3}), 0}},
      {"aten::aminmax", {x({5, 3}), 1}},
      {"aten::var.correction", {x({5, 3}), Ints{1}}},
      {"aten::std.correction", {x({5, 3}), Ints{0}, 0, true}},
      {"aten::var_mean.correction", {x({5, 3}), Ints{1}}},
      {"aten::std_mean.correction", {x({5, 3})}},
      {"aten::logsumexp", {x({5, 3}), Ints{1}}},
      {"aten::norm.Scalar", {x({5, 3})}},
      {"aten::norm.ScalarOpt_dim", {x({5, 3}), 2, Ints{1}}},
      {"aten::linalg_vector_norm", {x({5, 3})}},
      {"aten::linalg_vector_norm", {x({5, 3}), 3, Ints{0}, true}},
      {"aten::median", {x({5, 3})}},
      {"aten::median.dim", {x({5, 3}), 1}},
      {"aten::nanmedian.dim", {x({5, 3}), 1}},
      {"aten::kthvalue", {x({5, 3}), 2, 1}},
      {"aten::mode", {x({5, 3}), 0, true}},
      {"aten::cumsum", {x({5, 3}), 1}},
      {"aten::cumsum_", {x({5, 3}), 1}},
      {"aten::cumprod", {x({5, 3}), 0}},
      {"aten::logcumsumexp", {x({5, 3}), 0}},
      {"aten::cummax", {x({5, 3}), 0}},
      {"aten::cummin", {x({5, 3}), 1}},
      {"aten::topk", {x({5, 3}), 2, 1}},
      {"aten::sort", {x({5, 3}), 0}},
      {"aten::sort.stable", {x({5, 3}), true, 1}},
      {"aten::argsort", {x({5, 3}), 1}},
  };
}

std::vector<Sample> matmul_samples() {
  return {
      {"aten::mm", {x({5, 3}), x({3, 4})}},
      {"aten::bmm", {x({5, 2, 3}), x({5, 3, 4})}},
      {"aten::_trilinear",
       {x({5, 3}), x({4, 3, 2}), x({5, 2}), std::vector<int64_t>{1, 3}, std::vector<int64_t>{0},
        std::vector<int64_t>{1, 2}, std::vector<int64_t>{2, 3}}},
      {"aten::mv", {x({5, 3}), x({3})}},
      {"aten::dot", {x({5}), x({5})}},
      {"aten::vdot", {at::complex(x({5}), x({5})), at::complex(x({5}), x({5}))}},
      {"aten::outer", {x({5}), x({3})}},
      {"aten::addmm", {x({4}), x({5, 3}), x({3, 4}), 2, 0.5}},
      {"aten::addmm", {x({5, 4}), x({5, 3}), x({3, 4})}},
      {"aten::addmm", {x({5, 1}), x({5, 3}), x({3, 4})}},
      {"aten::addmm_", {x({5, 4}), x({5, 3}), x({3, 4})}},
      {"aten::baddbmm", {x({5, 2, 4}), x({5, 2, 3}), x({5, 3, 4})}},
      {"aten::baddbmm", {x({1, 4}), x({5, 2, 3}), x({5, 3, 4})}},
      {"aten::addmv", {x({5}), x({5, 3}), x({3})}},
      {"aten::addr", {x({5, 4}), x({5}), x({4})}},
      {"aten::addbmm", {x({2, 4}), x({5, 2, 3}), x({5, 3, 4}), 0.5, 2}},
      {"aten::addbmm", {x({4}), x({5, 2, 3}), x({5, 3, 4})}},
      {"aten::_int_mm", {ints({5, 3}, 9).to(at::kChar), ints({3, 4}, 9).to(at::kChar)}},
      {"aten::_addmm_activation", {x({4}), x({5, 3}), x({3, 4})}},
      {"tessera_rules_test::dense", {x({5, 2, 3}), x({3, 4})}, false, "tessera::dense"},
      {"tessera_rules_test::dense", {x({3}), x({3, 4})}, false, "tessera::dense"},
      {"tessera_rules_test::dense_bias", {x({5, 2, 3}), x({3, 4}), x({4})}, false, "tessera::dense_bias"},
      {"tessera_rules_test::dense_wgrad", {x({5, 2, 3}), x({5, 2, 4})}, false, "tessera::dense_wgrad"},
      {"tessera_rules_test::batched_matmul", {x({5, 2, 3, 4}), x({5, 2, 4, 2})}, false, "tessera::batched_matmul"},
  };
}

std::vector<Sample> factory_samples() {
  const at::Tensor like = x({5, 3});
  const at::IValue size = Ints{5, 3};
  const at::IValue other = Ints{4, 2};
  return {
      {"aten::zeros_like", {like}},
      {"aten::ones_like", {like}},
      {"aten::full_like", {like, 2.5}},
      {"aten::empty_like", {like}, true},
      {"aten::new_zeros", {like, size}},
      {"aten::new_zeros", {like, other}},
      {"aten::new_ones", {like, size}},
      {"aten::new_full", {like, other, 2}},
      {"aten::new_empty", {like, size}, true},
      {"aten::new_empty_strided", {like, size, Ints{1, 5}}, true},
  };
}

namespace {

std::vector<Sample> nll_samples() {
  const at::Tensor target = ints({5}, 4);
  target[1] = -100;
  const at::Tensor weight = at::rand({4}, at::kDouble) + 0.1;
  const at::Tensor total = at::scalar_tensor(3.5, at::kDouble);
  std::vector<Sample> out;
  for (const int64_t reduction : {0, 1, 2}) {
    const at::Tensor grad = reduction == 0 ? x({5}) : x({});
    out.push_back({"aten::nll_loss_forward", {x({5, 4}), target, none(), reduction, -100}});
    out.push_back({"aten::nll_loss_forward", {x({5, 4}), target, weight, reduction, -100}});
    out.push_back({"aten::nll_loss_backward", {grad, x({5, 4}), target, weight, reduction, -100, total}});
    const at::Tensor images = ints({5, 2, 3}, 4);
    const at::Tensor grads = reduction == 0 ? x({5, 2, 3}) : x({});
    out.push_back({"aten::nll_loss2d_forward", {x({5, 4, 2, 3}), images, weight, reduction, -100}});
    out.push_back({"aten::nll_loss2d_backward", {grads, x({5, 4, 2, 3}), images, weight, reduction, -100, total}});
  }
  out.push_back({"aten::nll_loss_forward", {x({4}), ints({}, 4), none(), 1, -100}});
  return out;
}

std::vector<Sample> attention_samples() {
  std::vector<Sample> out;
  const at::Tensor q = x({2, 3, 5, 4});
  const at::Tensor k = x({2, 3, 6, 4});
  const at::Tensor v = x({2, 3, 6, 4});
  for (const bool causal : {false, true}) {
    for (const at::Tensor& mask : {at::Tensor(), x({5, 6}), x({2, 1, 5, 6}), x({2, 3, 5, 6})}) {
      if (causal && mask.defined()) continue;
      const at::IValue given = mask.defined() ? at::IValue(mask) : none();
      const auto [result, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
          q, k, v, 0, causal, mask.defined() ? std::make_optional(mask) : std::nullopt);
      out.push_back({"aten::_scaled_dot_product_flash_attention_for_cpu", {q, k, v, 0.0, causal, given}});
      out.push_back({"aten::_scaled_dot_product_flash_attention_for_cpu_backward",
                     {x({2, 3, 5, 4}), q, k, v, result, logsumexp, 0.0, causal, given}});
    }
  }
  return out;
}

}  // namespace

std::vector<Sample> nn_samples() {
  const at::Tensor soft = at::softmax(x({5, 3, 2}), 1);
  std::vector<Sample> out = {
      {"aten::_softmax", {x({5, 3, 2}), 1, false}},
      {"aten::_log_softmax", {x({5, 3}), -1, false}},
      {"aten::_log_softmax", {x({}), 0, false}},
      {"aten::_safe_softmax", {x({5, 3}), 1}},
      {"aten::_softmax_backward_data", {x({5, 3, 2}), soft, 1, at::kDouble}},
      {"aten::_log_softmax_backward_data", {x({5, 3, 2}), soft, 1, at::kDouble}},
      {"aten::glu", {x({5, 4}), 1}},
      {"aten::glu_backward", {x({5, 2}), x({5, 4}), 1}},
      {"aten::embedding", {x({5, 3}), ints({2, 4}, 5)}},
      {"aten::embedding", {x({5, 3}), ints({}, 5)}},
      {"aten::embedding_dense_backward", {x({7, 3}), ints({7}, 5), 5, -1, false}},
      {"aten::embedding_dense_backward", {x({3, 2, 3}), ints({3, 2}, 5), 5, 2, false}},
      {"aten::embedding_dense_backward", {x({7, 3}), ints({7}, 5), 5, -1, true}},
  };
  for (const auto& more : {nll_samples(), attention_samples()}) out.insert(out.end(), more.begin(), more.end());
  return out;
}

std::vector<Sample> random_samples() {
  const at::Tensor like = x({5, 3});
  return {
      {"aten::rand_like", {like}, true},
      {"aten::randn_like", {like}, true},
      {"aten::randint_like", {like, 7}, true},
      {"aten::native_dropout", {like, 0.0, true}},
      {"aten::native_dropout", {like, 0.5, true}, true},
  };
}

std::vector<Sample> pointwise_samples() {
  const at::Tensor a = x({5, 3});
  const at::Tensor mask = bools({5, 3});
  return {
      {"aten::add.Tensor", {a, x({3}), 2}},
      {"aten::add.Tensor", {a, x({5, 1})}},
      {"aten::add.Tensor", {x({1, 3}), x({5, 1})}},
      {"aten::add.Tensor", {a, ints({5, 3}, 9)}},
      {"aten::add.Tensor", {ints({5, 3}, 9), ints({3}, 9)}},
      {"aten::add.Tensor", {a, x({})}},
      {"aten::add_.Tensor", {a, x({3})}},
      {"aten::mul.Tensor", {a, x({})}},
      {"aten::mul.Tensor", {mask, bools({5, 3})}},
      {"aten::mul.Tensor", {mask, a}},
      {"aten::mul.Tensor", {ints({5, 3}, 9), a}},
      {"aten::div.Tensor", {a, x({3})}},
      {"aten::div.Tensor", {ints({5, 3}, 9), ints({3}, 9) + 1}},
      {"aten::div.Tensor_mode", {ints({5, 3}, 9), ints({3}, 9) + 1, "floor"}},
      {"aten::_to_copy", {a, at::kFloat}},
      {"aten::_to_copy", {a, at::kLong}},
      {"aten::_to_copy", {mask, at::kDouble}},
      {"aten::clone", {mask}},
      {"aten::_conj", {at::complex(a, a)}},
      {"aten::_conj_copy", {at::complex(a, a)}},
      {"aten::relu", {x({5, 3}).to(at::kFloat)}},
      {"aten::where.self", {mask, x({5, 3}).to(at::kFloat), x({})}},
      {"aten::logical_and_", {a, mask}},
      {"aten::copy_", {a, x({3})}},
      {"aten::copy_", {a, ints({5, 3}, 9)}},
      {"aten::where.self", {mask, x({3}), a}},
      {"aten::masked_fill.Scalar", {a, bools({3}), 2.0}},
      {"aten::clamp.Tensor", {a, x({3})}},
      {"aten::native_dropout_backward", {a, mask, 2.0}},
      {"aten::_prelu_kernel", {a, x({1, 3})}},
      {"aten::fill_.Scalar", {a, 2.5}},
      {"aten::fill.Tensor", {a, x({})}},
      {"aten::mse_loss", {a, x({5, 3}), 0}},
      {"aten::mse_loss", {a, x({5, 3}), 1}},
      {"aten::mse_loss", {a, x({5, 3}), 2}},
      {"aten::mse_loss_backward", {x({5, 3}), a, x({5, 3}), 0}},
      {"aten::mse_loss_backward", {x({}), a, x({5, 3}), 1}},
      {"aten::mse_loss", {a, x({3}), 1}},
      {"aten::mse_loss_backward", {x({}), a, x({3}), 1}},
      {"aten::huber_loss", {a, x({5, 3}), 1, 0.5}},
      {"aten::huber_loss_backward", {x({}), a, x({5, 3}), 1, 0.5}},
      {"aten::smooth_l1_loss_backward", {x({}), a, x({5, 3}), 1, 0.5}},
      {"aten::binary_cross_entropy", {at::sigmoid(a), at::rand({5, 3}, at::kDouble), at::rand({5, 3}, at::kDouble), 1}},
      {"aten::binary_cross_entropy_backward",
       {x({}), at::sigmoid(a), at::rand({5, 3}, at::kDouble), at::rand({5, 3}, at::kDouble), 1}},
      {"aten::mse_loss_backward", {x({}), a, x({5, 3}), 2}},
      {"aten::log_sigmoid_backward", {x({5, 3}), a, std::get<1>(at::log_sigmoid_forward(a))}},
      {"aten::elu_backward", {x({5, 3}), 1.0, 1.0, 1.0, false, a}},
  };
}

}  // namespace tessera::testing
