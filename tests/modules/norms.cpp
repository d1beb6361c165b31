#include "tessera/tests/modules/row.h"

// clang-format off
namespace tessera::testing {

using namespace torch::nn;  // NOLINT: rows are written as a user writes modules

std::vector<ModuleRow> norm_rows() {
  return {
      MODULE(BatchNorm1d(4), waves({6, 4})),
      MODULE(BatchNorm1d(4), waves({6, 4, 3})),
      in_eval(MODULE(BatchNorm1d(4), waves({6, 4}))),
      MODULE(BatchNorm1d(BatchNorm1dOptions(4).affine(false).track_running_stats(false)), waves({6, 4})),
      MODULE(BatchNorm1d(BatchNorm1dOptions(4).momentum(std::nullopt)), waves({6, 4})),
      MODULE(BatchNorm2d(4), waves({6, 4, 3, 3})),
      in_eval(MODULE(BatchNorm2d(4), waves({6, 4, 3, 3}))),
      MODULE(BatchNorm3d(4), waves({6, 4, 2, 2, 2})),
      in_eval(MODULE(BatchNorm3d(4), waves({6, 4, 2, 2, 2}))),
      MODULE(InstanceNorm1d(4), waves({6, 4, 5})),
      MODULE(InstanceNorm1d(InstanceNorm1dOptions(4).affine(true).track_running_stats(true)), waves({6, 4, 5})),
      in_eval(MODULE(InstanceNorm1d(InstanceNorm1dOptions(4).affine(true).track_running_stats(true)), waves({6, 4, 5}))),
      MODULE(InstanceNorm2d(4), waves({6, 4, 3, 3})),
      MODULE(InstanceNorm2d(InstanceNorm2dOptions(4).affine(true)), waves({6, 4, 3, 3})),
      MODULE(InstanceNorm3d(InstanceNorm3dOptions(4).affine(true)), waves({6, 4, 2, 2, 2})),
      MODULE(GroupNorm(2, 4), waves({6, 4, 3})),
      MODULE(GroupNorm(GroupNormOptions(2, 4).affine(false)), waves({6, 4, 3, 3})),
      MODULE(LayerNorm(LayerNormOptions({4})), waves({6, 4})),
      MODULE(LayerNorm(LayerNormOptions({3, 4})), waves({6, 3, 4})),
      MODULE(LayerNorm(LayerNormOptions({4}).elementwise_affine(false)), waves({6, 3, 4})),
      MODULE(LocalResponseNorm(2), waves({6, 4, 3})),
      MODULE(LocalResponseNorm(3), waves({6, 4, 3, 3})),
      MODULE(CrossMapLRN2d(3), waves({6, 4, 3, 3})),
  };
}

std::vector<ModuleRow> activation_rows() {
  return {
      MODULE(ELU(), waves({6, 4})),
      MODULE(ELU(ELUOptions().alpha(0.7).inplace(true)), without_grad(waves({6, 4}))),
      MODULE(SELU(), waves({6, 4})),
      MODULE(Hardshrink(), waves({6, 4})),
      MODULE(Hardtanh(HardtanhOptions().min_val(-0.5).max_val(0.5)), waves({6, 4})),
      MODULE(LeakyReLU(), waves({6, 4})),
      MODULE(LogSigmoid(), waves({6, 4})),
      MODULE(Softmax(0), waves({6, 4})),
      MODULE(Softmax(1), waves({6, 4})),
      MODULE(Softmin(1), waves({6, 4})),
      MODULE(LogSoftmax(0), waves({6, 4})),
      MODULE(LogSoftmax(1), waves({6, 4})),
      MODULE(Softmax2d(), waves({6, 4, 3, 3})),
      MODULE(PReLU(), waves({6, 4})),
      MODULE(PReLU(PReLUOptions().num_parameters(4)), waves({6, 4, 3})),
      MODULE(ReLU(), waves({6, 4})),
      MODULE(ReLU(ReLUOptions(true)), without_grad(waves({6, 4}))),
      MODULE(ReLU6(), waves({6, 4})),
      in_eval(MODULE(RReLU(), waves({6, 4}))),
      drawing(MODULE(RReLU(), waves({6, 4}))),
      MODULE(CELU(), waves({6, 4})),
      MODULE(GLU(1), waves({6, 4})),
      MODULE(GLU(0), waves({6, 4})),
      MODULE(GELU(), waves({6, 4})),
      MODULE(GELU(GELUOptions().approximate("tanh")), waves({6, 4})),
      MODULE(SiLU(), waves({6, 4})),
      MODULE(Mish(), waves({6, 4})),
      MODULE(Sigmoid(), waves({6, 4})),
      MODULE(Softplus(), waves({6, 4})),
      MODULE(Softshrink(), waves({6, 4})),
      MODULE(Softsign(), waves({6, 4})),
      MODULE(Tanh(), waves({6, 4})),
      MODULE(Tanhshrink(), waves({6, 4})),
      MODULE(Threshold(0.1, 20), waves({6, 4})),
  };
}

}  // namespace tessera::testing
