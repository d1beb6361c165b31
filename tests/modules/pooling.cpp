#include "tessera/tests/modules/row.h"

// clang-format off
namespace tessera::testing {

using namespace torch::nn;  // NOLINT: rows are written as a user writes modules

namespace {

// Unpools with the indices that pooling the same input gives.
template <class Pool, class Unpool>
at::Tensor unpooled(Pool pool, Unpool& unpool, const at::Tensor& x) {
  const auto [values, places] = pool->forward_with_indices(x);
  return unpool->forward(values, places);
}

}  // namespace

std::vector<ModuleRow> pooling_rows() {
  return {
      MODULE(AvgPool1d(2), waves({6, 4, 7})),
      MODULE(AvgPool1d(AvgPool1dOptions(3).stride(2).padding(1).ceil_mode(true).count_include_pad(false)), waves({6, 4, 7})),
      MODULE(AvgPool2d(2), waves({6, 4, 6, 6})),
      MODULE(AvgPool2d(AvgPool2dOptions(3).stride(2).padding(1).divisor_override(5)), waves({6, 4, 6, 6})),
      MODULE(AvgPool3d(2), waves({6, 4, 4, 4, 4})),
      MODULE(MaxPool1d(2), waves({6, 4, 7})),
      MODULE(MaxPool1d(MaxPool1dOptions(3).stride(2).padding(1).dilation(1)), waves({6, 4, 7})),
      MODULE(MaxPool2d(2), waves({6, 4, 6, 6})),
      MODULE(MaxPool2d(MaxPool2dOptions(3).stride(1).padding(1).dilation(2)), waves({6, 4, 7, 7})),
      MODULE(MaxPool3d(2), waves({6, 4, 4, 4, 4})),
      MODULE(MaxPool3d(MaxPool3dOptions(2).stride(1).ceil_mode(true)), waves({6, 4, 4, 4, 4})),
      MODULE_BY(MaxPool1d(2), m->forward_with_indices(t[0]), waves({6, 4, 7})),
      MODULE_BY(MaxPool2d(2), m->forward_with_indices(t[0]), waves({6, 4, 6, 6})),
      MODULE_BY(MaxPool3d(2), m->forward_with_indices(t[0]), waves({6, 4, 4, 4, 4})),
      MODULE(AdaptiveAvgPool1d(3), waves({6, 4, 7})),
      MODULE(AdaptiveAvgPool2d(1), waves({6, 4, 5, 5})),
      MODULE(AdaptiveAvgPool2d(AdaptiveAvgPool2dOptions({3, 2})), waves({6, 4, 5, 5})),
      MODULE(AdaptiveAvgPool3d(2), waves({6, 4, 3, 3, 3})),
      MODULE(AdaptiveMaxPool1d(3), waves({6, 4, 7})),
      MODULE(AdaptiveMaxPool2d(AdaptiveMaxPool2dOptions({3, 2})), waves({6, 4, 5, 5})),
      MODULE(AdaptiveMaxPool3d(2), waves({6, 4, 3, 3, 3})),
      MODULE_BY(AdaptiveMaxPool2d(AdaptiveMaxPool2dOptions({3, 2})), m->forward_with_indices(t[0]), waves({6, 4, 5, 5})),
      MODULE_BY(MaxUnpool1d(2), unpooled(MaxPool1d(2), m, t[0]), waves({6, 4, 6})),
      MODULE_BY(MaxUnpool2d(2), unpooled(MaxPool2d(2), m, t[0]), waves({6, 4, 6, 6})),
      MODULE_BY(MaxUnpool3d(2), unpooled(MaxPool3d(2), m, t[0]), waves({6, 4, 4, 4, 4})),
      // The stride is a whole number, so the random numbers drawn have no effect.
      drawing_plain(MODULE(FractionalMaxPool2d(FractionalMaxPool2dOptions(2).output_size(3)), waves({6, 4, 6, 6}))),
      drawing_plain(MODULE(FractionalMaxPool3d(FractionalMaxPool3dOptions(2).output_size(2)), waves({6, 4, 4, 4, 4}))),
      MODULE(FractionalMaxPool2d(FractionalMaxPool2dOptions(2).output_size(3)._random_samples(shares({6, 4, 2}))), waves({6, 4, 6, 6})),
      MODULE(FractionalMaxPool3d(FractionalMaxPool3dOptions(2).output_size(2)._random_samples(shares({6, 4, 3}))), waves({6, 4, 4, 4, 4})),
      MODULE(LPPool1d(2, 3), shares({6, 4, 7})),
      MODULE(LPPool2d(2, 2), shares({6, 4, 6, 6})),
      MODULE(LPPool2d(LPPool2dOptions(3, {2, 3}).stride({2, 1}).ceil_mode(true)), shares({6, 4, 6, 6})),
      MODULE(LPPool3d(2, 2), shares({6, 4, 4, 4, 4})),
  };
}

}  // namespace tessera::testing
