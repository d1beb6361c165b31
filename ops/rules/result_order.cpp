#include "tessera/ops/rules/result_order.h"

#include <algorithm>
#include <array>

namespace tessera::rules {
namespace {

constexpr std::array<std::string_view, 33> kRowMajor = {"aten::_adaptive_avg_pool3d_backward",
                                                        "aten::_cdist_backward",
                                                        "aten::_fft_c2c",
                                                        "aten::_fft_r2c",
                                                        "aten::_logcumsumexp",
                                                        "aten::_safe_softmax",
                                                        "aten::_scaled_mm",
                                                        "aten::_standard_gamma_grad",
                                                        "aten::_weight_norm_interface",
                                                        "aten::addbmm",
                                                        "aten::bucketize",
                                                        "aten::cummax",
                                                        "aten::cummin",
                                                        "aten::embedding",
                                                        "aten::fractional_max_pool3d_backward",
                                                        "aten::glu_backward",
                                                        "aten::grid_sampler_2d_backward",
                                                        "aten::grid_sampler_3d_backward",
                                                        "aten::huber_loss_backward",
                                                        "aten::index_select",
                                                        "aten::linalg_matrix_exp",
                                                        "aten::log_sigmoid_forward",
                                                        "aten::logcumsumexp",
                                                        "aten::mse_loss_backward",
                                                        "aten::multi_margin_loss_backward",
                                                        "aten::multilabel_margin_loss_backward",
                                                        "aten::multilabel_margin_loss_forward",
                                                        "aten::native_layer_norm",
                                                        "aten::native_layer_norm_backward",
                                                        "aten::nll_loss2d_forward",
                                                        "aten::searchsorted",
                                                        "aten::smooth_l1_loss_backward",
                                                        "aten::take"};
constexpr std::array<std::string_view, 23> kImage = {"aten::_adaptive_avg_pool2d",
                                                     "aten::_adaptive_avg_pool2d_backward",
                                                     "aten::_batch_norm_impl_index",
                                                     "aten::_native_batch_norm_legit",
                                                     "aten::_native_batch_norm_legit_no_training",
                                                     "aten::batch_norm_backward",
                                                     "aten::channel_shuffle",
                                                     "aten::max_pool3d_with_indices",
                                                     "aten::max_pool3d_with_indices_backward",
                                                     "aten::max_unpool2d",
                                                     "aten::native_batch_norm",
                                                     "aten::native_batch_norm_backward",
                                                     "aten::native_channel_shuffle",
                                                     "aten::native_group_norm_backward",
                                                     "aten::pixel_unshuffle",
                                                     "aten::reflection_pad2d",
                                                     "aten::reflection_pad2d_backward",
                                                     "aten::reflection_pad3d",
                                                     "aten::reflection_pad3d_backward",
                                                     "aten::replication_pad2d",
                                                     "aten::replication_pad2d_backward",
                                                     "aten::replication_pad3d",
                                                     "aten::replication_pad3d_backward"};
constexpr std::array<std::string_view, 3> kConvolution = {"aten::_convolution", "aten::convolution",
                                                          "aten::convolution_backward"};
// A GPU's kernels give row-major results.
constexpr std::array<std::string_view, 2> kImageOnCpu = {"aten::native_group_norm", "aten::roll"};

template <std::size_t N>
bool is_in(const std::array<std::string_view, N>& names, std::string_view name) {
  return std::ranges::binary_search(names, name);
}

}  // namespace

ResultOrder result_order(std::string_view name, bool on_cpu) {
  if (is_in(kRowMajor, name)) return ResultOrder::kRowMajor;
  if (is_in(kImage, name)) return ResultOrder::kImage;
  if (is_in(kConvolution, name)) return ResultOrder::kConvolution;
  if (is_in(kImageOnCpu, name)) return on_cpu ? ResultOrder::kImage : ResultOrder::kRowMajor;
  if (name == "aten::constant_pad_nd") return ResultOrder::kAsMetaOfWhole;
  return ResultOrder::kAsMeta;
}

}  // namespace tessera::rules
