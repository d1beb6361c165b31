#include <ATen/ATen.h>
#include <ATen/TensorIndexing.h>

#include "tessera/tests/everyday/row.h"

// clang-format off
namespace tessera::testing {

namespace {

// C++ leaves open which argument of a call comes first, and backward communicates in the opposite order.
at::Tensor flat_conv1d(const at::Tensor& image, const at::Tensor& filter) {
  const at::Tensor signal = image.flatten(2), kernel = filter.flatten(2);
  return at::conv1d(signal, kernel);
}

}  // namespace

std::vector<Row> layer_rows() {
  return {
      EVERYDAY("a/a -/- s/g a/a a/a", at::softmax(x, 0)),
      EVERYDAY("-/- a/a s/g -/- a/a", at::softmax(x, 1)),
      EVERYDAY("-/- a/a s/g -/- a/a", at::log_softmax(x, 1)),
      EVERYDAY("-/r a/aar s/sgr -/r a/aar", at::layer_norm(x, {5}, vector, vector)),
      EVERYDAY("-/- -/- s/sg -/- -/-", at::layer_norm(image, {6, 6})),
      EVERYDAY("-/r ssg/gsaa sg/rssg -/r ssg/rgsaa", at::rms_norm(x, {5}, vector)),
      EVERYDAY("-/- a/aa s/sg -/- -/-", at::group_norm(image, 2)),
      EVERYDAY("rr/r -/- rrr/rr rr/r rr/r", at::batch_norm(image, {}, {}, {}, {}, true, 0.1, 1e-5, false)),
      EVERYDAY("-/- -/- rrr/rr -/- -/-", at::instance_norm(image, {}, {}, {}, {}, true, 0.1, 1e-5, false)),
      EVERYDAY("-/r -/g -/sgr -/r -/rg", at::conv2d(image, filter)),
      EVERYDAY("-/r -/g -/sgr -/r -/rg", at::conv2d(image, filter, {}, 1, 1)),
      EVERYDAY("-/r -/g -/srg -/r -/rg", flat_conv1d(image, filter)),
      EVERYDAY("-/r -/g -/sgr -/r -/rg", at::conv_transpose2d(image, filter.transpose(0, 1))),
      EVERYDAY("-/- -/- s/sg -/- -/-", at::max_pool2d(image, {2, 2})),
      EVERYDAY("-/- -/- -/sg -/- -/-", at::avg_pool2d(image, {2, 2})),
      EVERYDAY("-/- -/- -/sg -/- -/-", at::adaptive_avg_pool2d(image, {2, 2})),
      EVERYDAY("a/aga -/g -/srg a/aga a/aga", at::conv2d(image.transpose(0, 2), filter, {}, 1, 1)),
      EVERYDAY("a/aa -/- s/sg a/aa -/-", at::max_pool2d(image.transpose(0, 2), {2, 2})),
      EVERYDAY("a/aa -/- -/sg a/aa a/aa", at::avg_pool2d(image.transpose(0, 2), {3, 3}, {1, 1}, {1, 1})),
      EVERYDAY("-/- -/- -/- -/- -/-", at::upsample_nearest2d(image, {12, 12})),
      EVERYDAY("-/- -/- -/- -/- -/-", at::upsample_bilinear2d(image, {12, 12}, false)),
      EVERYDAY("-/- -/- sss/sssg -/- -/-", at::scaled_dot_product_attention(heads, heads, heads)),
      EVERYDAY("-/- -/- sss/sssg -/- -/-", at::scaled_dot_product_attention(heads, heads, heads, {}, 0, true)),
      EVERYDAY("-/- -/- ss/rr -/- -/-", at::mse_loss(x, y)),
      EVERYDAY("-/- -/- ss/rr -/- -/-", at::mse_loss(x, y, at::Reduction::Sum)),
      EVERYDAY("-/- -/- s/sgg -/- -/-", at::l1_loss(x, y)),
      EVERYDAY("-/- -/- ss/ssssgg -/- -/-", at::smooth_l1_loss(x, y)),
      EVERYDAY("-/- -/- ss/ssssgg -/- -/-", at::huber_loss(x, y)),
      EVERYDAY("-/- -/- ss/g -/- -/-", at::binary_cross_entropy(at::sigmoid(x), at::sigmoid(y).detach())),
      EVERYDAY("-/- -/- sss/sg -/- -/-", at::binary_cross_entropy_with_logits(x, at::sigmoid(y).detach())),
      EVERYDAY("-/- aa/a ss/g -/- aa/a", at::kl_div(at::log_softmax(x, 1), at::softmax(y, 1).detach())),
      EVERYDAY("r/- rr/- sr/g r/- rrr/-", at::cross_entropy_loss(x, classes)),
      EVERYDAY("r/- rr/- sr/g r/- rrr/-", at::cross_entropy_loss(x, classes, vector.abs().detach())),
      EVERYDAY("r/- rr/- sr/g r/- rrr/-", at::cross_entropy_loss(x, classes, {}, at::Reduction::Mean, 2)),
      EVERYDAY("r/- ar/a sr/g r/- arr/a", at::nll_loss(at::log_softmax(x, 1), classes)),
      EVERYDAY("-/- a/aa s/sg -/- a/aa", at::multi_margin_loss(x, classes)),
      EVERYDAY("-/- ssgg/ggggggggrggr ssss/sssgsg -/- ssgg/ggggggggrggr", at::cosine_similarity(x, y, 1)),
      EVERYDAY("-/- s/gg s/gg -/- s/gg", at::pairwise_distance(x, y)),
      EVERYDAY("-/- a/aa s/sg -/- a/aa", at::glu(image, 1)),
      EVERYDAY("-/- -/- -/- -/- -/-", at::dropout(x, 0, true)),
      EVERYDAY("-/gg a/gg s/rg -/gg a/gg", at::_weight_norm(x, vector.norm() * at::ones({6, 1}, at::kDouble), 0)),
  };
}

}  // namespace tessera::testing
