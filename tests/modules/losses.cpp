#include "tessera/tests/modules/row.h"

// clang-format off
namespace tessera::testing {

using namespace torch::nn;  // NOLINT: rows are written as a user writes modules

namespace {

at::Tensor log_probabilities(at::IntArrayRef sizes, int64_t dim) { return waves(sizes).log_softmax(dim); }

// Returns the output and the loss, which the module gives as a plain number, as a tensor.
template <class Module>
Tensors adaptive(Module& m, const Tensors& t) {
  const ASMoutput out = m->forward(t[0], t[1]);
  return {out.output, at::scalar_tensor(out.loss, at::kDouble)};
}

// Returns rows of class numbers, filled up with -1.
at::Tensor label_sets() { return at::tensor({0, 2, -1, 1, 1, -1, 0, 0, 3, 1, 0, -1, 2, -1, 1, 3, -1, 0, 0, 0, 1, 2, 3, -1}, at::kLong).view({6, 4}); }

at::Tensor lengths(std::vector<int64_t> values) { return at::tensor(values, at::kLong); }

}  // namespace

std::vector<ModuleRow> loss_rows() {
  return {
      MODULE(L1Loss(), waves({6, 4}), waves({6, 4}, 2)),
      MODULE(L1Loss(L1LossOptions(torch::kSum)), waves({6, 4}), waves({6, 4}, 2)),
      MODULE(L1Loss(L1LossOptions(torch::kNone)), waves({6, 4}), waves({6, 4}, 2)),
      MODULE(MSELoss(), waves({6, 4}), waves({6, 4}, 2)),
      MODULE(MSELoss(MSELossOptions(torch::kSum)), waves({6, 4}), waves({6, 4}, 2)),
      MODULE(MSELoss(), waves({6, 4}), plain(waves({6, 4}, 2))),
      MODULE(SmoothL1Loss(), waves({6, 4}), waves({6, 4}, 2)),
      MODULE(SmoothL1Loss(SmoothL1LossOptions(torch::kSum).beta(0.3)), waves({6, 4}), waves({6, 4}, 2)),
      MODULE(HuberLoss(HuberLossOptions().delta(0.4)), waves({6, 4}), waves({6, 4}, 2)),
      MODULE(KLDivLoss(), log_probabilities({6, 4}, 1), shares({6, 4}, 2)),
      MODULE(KLDivLoss(KLDivLossOptions().reduction(torch::kBatchMean)), log_probabilities({6, 4}, 1), shares({6, 4}, 2)),
      MODULE(KLDivLoss(KLDivLossOptions().reduction(torch::kSum).log_target(true)), log_probabilities({6, 4}, 1), log_probabilities({6, 4}, 0)),
      MODULE(BCELoss(), shares({6, 4}), without_grad(shares({6, 4}, 2))),
      MODULE(BCELoss(BCELossOptions().weight(shares({4})).reduction(torch::kSum)), shares({6, 4}), without_grad(shares({6, 4}, 2))),
      MODULE(BCEWithLogitsLoss(), waves({6, 4}), without_grad(shares({6, 4}, 2))),
      MODULE(BCEWithLogitsLoss(BCEWithLogitsLossOptions().weight(shares({4})).pos_weight(shares({4}, 3))), waves({6, 4}), without_grad(shares({6, 4}, 2))),
      MODULE(HingeEmbeddingLoss(), waves({6, 4}), without_grad(signs({6, 4}))),
      MODULE(HingeEmbeddingLoss(HingeEmbeddingLossOptions().margin(0.4).reduction(torch::kSum)), waves({6, 4}), without_grad(signs({6, 4}))),
      MODULE(MultiMarginLoss(), waves({6, 4}), indices({6}, 4)),
      MODULE(MultiMarginLoss(MultiMarginLossOptions().p(2).margin(0.5).weight(shares({4}))), waves({6, 4}), indices({6}, 4)),
      MODULE(CosineEmbeddingLoss(), waves({6, 4}), waves({6, 4}, 2), without_grad(signs({6}))),
      MODULE(CosineEmbeddingLoss(CosineEmbeddingLossOptions().margin(0.1).reduction(torch::kNone)), waves({6, 4}), waves({6, 4}, 2), without_grad(signs({6}))),
      MODULE(MultiLabelMarginLoss(), waves({6, 4}), label_sets()),
      MODULE(MultiLabelMarginLoss(MultiLabelMarginLossOptions(torch::kNone)), waves({6, 4}), label_sets()),
      MODULE(SoftMarginLoss(), waves({6, 4}), without_grad(signs({6, 4}))),
      MODULE(SoftMarginLoss(SoftMarginLossOptions(torch::kSum)), waves({6, 4}), without_grad(signs({6, 4}))),
      MODULE(MultiLabelSoftMarginLoss(), waves({6, 4}), without_grad(shares({6, 4}, 2))),
      MODULE(MultiLabelSoftMarginLoss(MultiLabelSoftMarginLossOptions().weight(shares({4}))), waves({6, 4}), without_grad(shares({6, 4}, 2))),
      MODULE(TripletMarginLoss(), waves({6, 4}), waves({6, 4}, 2), waves({6, 4}, 3)),
      MODULE(TripletMarginLoss(TripletMarginLossOptions().p(1).swap(true).margin(0.3)), waves({6, 4}), waves({6, 4}, 2), waves({6, 4}, 3)),
      MODULE(TripletMarginWithDistanceLoss(), waves({6, 4}), waves({6, 4}, 2), waves({6, 4}, 3)),
      MODULE(TripletMarginWithDistanceLoss(TripletMarginWithDistanceLossOptions().swap(true).distance_function([](const at::Tensor& a, const at::Tensor& b) { return (a - b).abs().sum(-1); })), waves({6, 4}), waves({6, 4}, 2), waves({6, 4}, 3)),
      MODULE(CTCLoss(), log_probabilities({5, 6, 4}, 2), indices({6, 2}, 3) + 1, plain(lengths({5, 5, 4, 5, 3, 5})), plain(lengths({2, 1, 2, 2, 1, 2}))),
      MODULE(CTCLoss(CTCLossOptions().reduction(torch::kSum).zero_infinity(true)), log_probabilities({5, 6, 4}, 2), indices({6, 2}, 3) + 1, plain(lengths({5, 5, 4, 5, 3, 5})), plain(lengths({2, 1, 2, 2, 1, 2}))),
      MODULE(PoissonNLLLoss(), waves({6, 4}), without_grad(shares({6, 4}, 2))),
      MODULE(PoissonNLLLoss(PoissonNLLLossOptions().log_input(false).full(true)), shares({6, 4}), without_grad(shares({6, 4}, 2) * 3)),
      MODULE(MarginRankingLoss(), waves({6, 4}), waves({6, 4}, 2), without_grad(signs({6, 4}))),
      MODULE(MarginRankingLoss(MarginRankingLossOptions().margin(0.2).reduction(torch::kSum)), waves({6}), waves({6}, 2), without_grad(signs({6}))),
      MODULE(NLLLoss(), log_probabilities({6, 4}, 1), indices({6}, 4)),
      MODULE(NLLLoss(NLLLossOptions().weight(shares({4})).ignore_index(1)), log_probabilities({6, 4}, 1), indices({6}, 4)),
      MODULE(NLLLoss(), log_probabilities({6, 4, 3, 3}, 1), indices({6, 3, 3}, 4)),
      MODULE(NLLLoss(NLLLossOptions().reduction(torch::kNone)), log_probabilities({6, 4, 3}, 1), indices({6, 3}, 4)),
      MODULE(CrossEntropyLoss(), waves({6, 4}), indices({6}, 4)),
      MODULE(CrossEntropyLoss(CrossEntropyLossOptions().weight(shares({4})).label_smoothing(0.1)), waves({6, 4}), indices({6}, 4)),
      MODULE(CrossEntropyLoss(CrossEntropyLossOptions().reduction(torch::kSum).ignore_index(2)), waves({6, 4}), indices({6}, 4)),
      MODULE(CrossEntropyLoss(), waves({6, 4}), without_grad(shares({6, 4}, 2))),
      MODULE(CrossEntropyLoss(), waves({6, 4, 3, 3}), indices({6, 3, 3}, 4)),
      MODULE(CrossEntropyLoss(), waves({6, 4}), plain(indices({6}, 4))),
      MODULE_BY(AdaptiveLogSoftmaxWithLoss(AdaptiveLogSoftmaxWithLossOptions(4, 9, {3, 6}).div_value(2)), adaptive(m, t), waves({6, 4}), indices({6}, 9)),
      MODULE_BY(AdaptiveLogSoftmaxWithLoss(AdaptiveLogSoftmaxWithLossOptions(4, 9, {3, 6}).div_value(2).head_bias(true)), m->log_prob(t[0]), waves({6, 4})),
      MODULE_BY(AdaptiveLogSoftmaxWithLoss(AdaptiveLogSoftmaxWithLossOptions(4, 9, {3, 6}).div_value(2)), m->predict(t[0]), waves({6, 4})),
  };
}

}  // namespace tessera::testing
