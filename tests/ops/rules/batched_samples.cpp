#include <ATen/ATen.h>

#include "tessera/tests/ops/rules/made_tensors.h"
#include "tessera/tests/ops/rules/samples.h"

namespace tessera::testing {
namespace {

using namespace made;

using Ints = std::vector<int64_t>;

// The matrices are far from singular.
at::Tensor square(const Ints& batch) {
  Ints sizes = batch;
  sizes.insert(sizes.end(), {3, 3});
  return x(sizes) + 4 * at::eye(3, at::kDouble);
}
at::Tensor definite(const Ints& batch) {
  const at::Tensor a = square(batch);
  return a.matmul(a.mT());
}

std::vector<Sample> algebra() {
  const at::Tensor a = square({5});
  const at::Tensor d = definite({5, 2});
  const auto [lu, pivots, info] = at::linalg_lu_factor_ex(a);
  const auto [ld, ld_pivots, ld_info] = at::linalg_ldl_factor_ex(definite({5}));
  const auto [reflectors, tau] = at::geqrf(x({5, 4, 3}));
  return {
      {"aten::linalg_inv_ex", {a}},
      {"aten::linalg_inv_ex", {square({})}},
      {"aten::linalg_cholesky_ex", {d}},
      {"aten::cholesky", {d}},
      {"aten::cholesky_inverse", {at::linalg_cholesky(d)}},
      {"aten::_cholesky_solve_helper", {x({5, 2, 3, 4}), at::linalg_cholesky(d), false}},
      {"aten::_linalg_det", {a}},
      {"aten::_linalg_slogdet", {a}},
      {"aten::_linalg_svd", {x({5, 4, 3})}},
      {"aten::_linalg_svd", {x({5, 4, 3}), false, false}},
      {"aten::_linalg_eigh", {definite({5})}},
      {"aten::linalg_eig", {a}},
      {"aten::_linalg_eigvals", {a}},
      {"aten::linalg_qr", {x({5, 4, 3})}},
      {"aten::linalg_qr", {x({5, 4, 3}), "r"}},
      {"aten::geqrf", {x({5, 4, 3})}},
      {"aten::linalg_householder_product", {reflectors, tau}},
      {"aten::ormqr", {reflectors, tau, x({5, 4, 2})}},
      {"aten::linalg_lu_factor_ex", {a}},
      {"aten::linalg_lu", {x({5, 4, 3})}},
      {"aten::linalg_lu_solve", {lu, pivots, x({5, 3, 2})}},
      {"aten::lu_unpack", {lu, pivots}},
      {"aten::_linalg_solve_ex", {a, x({5, 3, 2})}},
      {"aten::_linalg_solve_ex", {a, x({5, 3})}},
      {"aten::_linalg_solve_ex", {a, x({3, 2})}},
      {"aten::linalg_solve_triangular", {a.triu(), x({5, 3, 2}), true}},
      {"aten::triangular_solve", {x({5, 3, 2}), a.triu()}},
      {"aten::linalg_ldl_factor_ex", {definite({5})}},
      {"aten::linalg_ldl_solve", {ld, ld_pivots, x({5, 3, 2})}},
      {"aten::linalg_matrix_exp", {x({5, 3, 3})}},
      {"aten::_cdist_forward", {x({5, 4, 3}), x({5, 2, 3}), 2.0, none()}},
      {"aten::_cdist_forward", {x({4, 3}), x({5, 2, 3}), 1.0, none()}},
      {"aten::_cdist_backward", {x({5, 4, 2}), x({5, 4, 3}), x({5, 2, 3}), 1.0, x({5, 4, 2}).abs()}},
  };
}

std::vector<Sample> pooling() {
  const at::Tensor image = x({3, 5, 6, 4});
  const at::Tensor volume = x({3, 2, 4, 4, 4});
  const auto [most, where] = at::max_pool2d_with_indices(image, {2, 2});
  const auto [most3, where3] = at::max_pool3d_with_indices(volume, {2, 2, 2});
  const at::Tensor drawn = at::rand({3, 5, 2}, at::kDouble);
  const at::Tensor drawn3 = at::rand({3, 2, 3}, at::kDouble);
  const auto [some, where_some] = at::fractional_max_pool2d(image, {2, 2}, {3, 2}, drawn);
  const auto [some3, where_some3] = at::fractional_max_pool3d(volume, {2, 2, 2}, {2, 2, 2}, drawn3);
  const auto [large, at2] = at::adaptive_max_pool2d(image, {2, 3});
  const auto [large3, at3] = at::adaptive_max_pool3d(volume, {2, 3, 1});
  const Ints two = {2, 2};
  const Ints three = {2, 2, 2};
  return {
      {"aten::_adaptive_avg_pool2d", {image, Ints{2, 3}}},
      {"aten::_adaptive_avg_pool3d", {volume, Ints{2, 3, 1}}},
      {"aten::_adaptive_avg_pool2d_backward", {x({3, 5, 2, 3}), image}},
      {"aten::_adaptive_avg_pool3d_backward", {x({3, 2, 2, 3, 1}), volume}},
      {"aten::adaptive_max_pool2d", {image, Ints{2, 3}}},
      {"aten::adaptive_max_pool3d", {volume, Ints{2, 3, 1}}},
      {"aten::_prelu_kernel_backward", {x({5, 3}), x({5, 3}), x({1, 3})}},
      {"aten::fractional_max_pool2d", {image, two, Ints{3, 2}, drawn}},
      {"aten::fractional_max_pool3d", {volume, three, three, drawn3}},
      {"aten::fractional_max_pool2d_backward", {at::randn_like(some), image, two, Ints{3, 2}, where_some}},
      {"aten::fractional_max_pool3d_backward", {at::randn_like(some3), volume, three, three, where_some3}},
      {"aten::adaptive_max_pool2d_backward", {at::randn_like(large), image, at2}},
      {"aten::adaptive_max_pool3d_backward", {at::randn_like(large3), volume, at3}},
      {"aten::max_unpool2d", {most, where, Ints{6, 4}}},
      {"aten::max_unpool3d", {most3, where3, Ints{4, 4, 4}, three, Ints{0, 0, 0}}},
  };
}

// Calls of reflection_pad and replication_pad in one to three dimensions, and of their gradients.
std::vector<Sample> padding() {
  std::vector<Sample> out;
  for (const std::string kind : {"aten::reflection_pad", "aten::replication_pad"}) {
    Ints sizes = {5, 3};
    Ints padded = sizes;
    Ints amounts;
    for (const int64_t dims : {1, 2, 3}) {
      sizes.push_back(4);
      padded.push_back(7);
      amounts.insert(amounts.end(), {1, 2});
      const std::string name = kind + std::to_string(dims) + "d";
      out.push_back({name, {x(sizes), amounts}});
      out.push_back({name, {x(Ints(sizes.begin() + 1, sizes.end())), amounts}});
      out.push_back({name + "_backward", {x(padded), x(sizes), amounts}});
    }
  }
  return out;
}

// Resamples to size 3 in each dimension, and takes the gradient.
std::vector<Sample> resampling() {
  std::vector<Sample> out;
  for (const ResamplingKind& kind : resampling_kinds()) {
    Ints before = {5, 3};
    Ints after = before;
    before.resize(2 + kind.dims, 2);
    after.resize(2 + kind.dims, 3);
    const Ints wanted(kind.dims, 3);
    Sample forward{"aten::" + kind.name, {x(before), wanted}};
    Sample backward{"aten::" + kind.name + "_backward", {x(after), wanted, before}};
    if (kind.corners) {
      forward.args.emplace_back(false);
      backward.args.emplace_back(false);
    }
    out.push_back(std::move(forward));
    out.push_back(std::move(backward));
  }
  return out;
}

std::vector<Sample> others() {
  const Ints one = {1, 1};
  const Ints two = {2, 2};
  const Ints zero = {0, 0};
  const at::Tensor steps = at::arange(4, at::kDouble);
  const at::Tensor image = x({3, 4, 4, 6});
  const at::Tensor volume = x({3, 2, 2, 3, 4});
  const at::Tensor grid = at::rand({3, 5, 2, 2}, at::kDouble) * 2 - 1;
  const at::Tensor grid3 = at::rand({3, 2, 2, 2, 3}, at::kDouble) * 2 - 1;
  const c10::List<bool> both({true, true});
  const at::Tensor complex = at::complex(x({5, 4, 3}), x({5, 4, 3}));
  return {
      {"aten::im2col", {image, two, one, zero, one}},
      {"aten::im2col", {x({3, 4, 4}), two, one, zero, one}},
      {"aten::col2im", {x({3, 8, 9}), Ints{4, 4}, two, one, zero, one}},
      {"aten::pixel_shuffle", {image, 2}},
      {"aten::pixel_unshuffle", {image, 2}},
      {"aten::channel_shuffle", {image, 2}},
      {"aten::native_channel_shuffle", {image, 2}},
      {"aten::grid_sampler_2d", {image, grid, 0, 0, false}},
      {"aten::grid_sampler_3d", {volume, grid3, 0, 0, false}},
      {"aten::grid_sampler_2d_backward", {x({3, 4, 5, 2}), image, grid, 0, 0, false, both}},
      {"aten::grid_sampler_3d_backward", {x({3, 2, 2, 2, 2}), volume, grid3, 0, 0, false, both}},
      {"aten::bucketize.Tensor", {x({5, 3}), steps}},
      {"aten::searchsorted.Tensor", {steps, x({5, 3})}},
      {"aten::searchsorted.Tensor", {steps.expand({5, 4}).contiguous(), x({5, 3})}},
      {"aten::isin.Tensor_Tensor", {at::randint(9, {5, 3}), at::randint(9, {4})}},
      {"aten::take", {x({5, 3}), at::randint(15, {4, 2})}},
      {"aten::_fft_r2c", {x({5, 4, 3}), Ints{1}, 0, true}},
      {"aten::_fft_c2r", {complex, Ints{2}, 0, 4}},
      {"aten::_fft_c2c", {complex, Ints{0, 2}, 1, true}},
  };
}

std::vector<Sample> losses() {
  const at::Tensor classes = at::randint(3, {5}, at::kLong);
  const at::Tensor several = at::tensor({0, 2, -1, 1, -1, 0, 2, 1, 0, -1, 1, 2, 0, 1, 2}, at::kLong).view({5, 3});
  const at::Tensor is_target = std::get<1>(at::multilabel_margin_loss_forward(x({5, 3}), several, 0));
  return {
      {"aten::multi_margin_loss", {x({5, 3}), classes, 1, 1, none(), 0}},
      {"aten::multi_margin_loss", {x({5, 3}), classes, 2, 0.5, x({3}).abs(), 0}},
      {"aten::multi_margin_loss_backward", {x({5}), x({5, 3}), classes, 1, 1, none(), 0}},
      {"aten::multilabel_margin_loss_forward", {x({5, 3}), several, 0}},
      {"aten::multilabel_margin_loss_backward", {x({5}), x({5, 3}), several, 0, is_target}},
      {"aten::trace", {x({5, 3})}},
  };
}

}  // namespace

const std::vector<ResamplingKind>& resampling_kinds() {
  static const std::vector<ResamplingKind> kinds = {
      {"upsample_nearest1d", 1, false},        {"upsample_nearest2d", 2, false},
      {"upsample_nearest3d", 3, false},        {"_upsample_nearest_exact1d", 1, false},
      {"_upsample_nearest_exact2d", 2, false}, {"_upsample_nearest_exact3d", 3, false},
      {"upsample_linear1d", 1, true},          {"upsample_bilinear2d", 2, true},
      {"upsample_bicubic2d", 2, true},         {"upsample_trilinear3d", 3, true},
      {"_upsample_bilinear2d_aa", 2, true},    {"_upsample_bicubic2d_aa", 2, true}};
  return kinds;
}

std::vector<Sample> batched_samples() {
  std::vector<Sample> out;
  for (auto& list : {algebra(), pooling(), padding(), resampling(), losses(), others()})
    out.insert(out.end(), list.begin(), list.end());
  return out;
}

}  // namespace tessera::testing
