#include "tessera/bench/raw_sequence.h"

#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/dtensor/saved.h"

namespace tessera::bench {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

// [batch, sequence / ranks, features] -> [batch, sequence, features]
at::Tensor gathered(const at::Tensor& x, const Backend& group) {
  const int64_t n = group->getSize(), b = x.size(0), s = x.size(1), f = x.size(2);
  at::Tensor parts = at::empty({n * b, s, f}, x.options());
  at::Tensor piece = x.contiguous();
  group->_allgather_base(parts, piece)->wait();
  return parts.view({n, b, s, f}).transpose(0, 1).reshape({b, n * s, f});
}

// [batch, sequence, features] -> [batch, sequence / ranks, features]
at::Tensor summed(const at::Tensor& x, const Backend& group) {
  const int64_t n = group->getSize(), b = x.size(0), s = x.size(1) / n, f = x.size(2);
  return summed_rows(x.view({b, n, s, f}).transpose(0, 1).reshape({n * b, s, f}), group);
}

void all_reduce(at::Tensor tensor, const Backend& group, c10d::ReduceOp op = c10d::ReduceOp::SUM) {
  std::vector<at::Tensor> tensors = {std::move(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = std::move(op);
  group->allreduce(tensors, options)->wait();
}

struct GatherSequence : torch::autograd::Function<GatherSequence> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const Backend& group) {
    detail::saved<Backend>(ctx, "group") = group;
    return gathered(x, group);
  }
  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    return {summed(grads[0].contiguous(), detail::saved<Backend>(ctx, "group")), at::Tensor()};
  }
};

struct SumSequence : torch::autograd::Function<SumSequence> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const Backend& group) {
    detail::saved<Backend>(ctx, "group") = group;
    return summed(x, group);
  }
  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    return {gathered(grads[0], detail::saved<Backend>(ctx, "group")), at::Tensor()};
  }
};

struct CutCrossEntropy : torch::autograd::Function<CutCrossEntropy> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits, const at::Tensor& targets,
                            const Backend& group) {
    const int64_t mine = logits.size(1), begin = group->getRank() * mine;
    const at::Tensor largest = logits.amax(1, /*keepdim=*/true);
    all_reduce(largest, group, c10d::ReduceOp::MAX);
    const at::Tensor shifted = logits - largest;
    const at::Tensor here = (targets - begin).unsqueeze(1);
    const at::Tensor elsewhere = (here < 0).logical_or(here >= mine);
    const at::Tensor index = here.masked_fill(elsewhere, 0);
    const at::Tensor both = at::empty({2, logits.size(0), 1}, logits.options());
    both[0].copy_(shifted.gather(1, index).masked_fill_(elsewhere, 0));  // of the target
    at::Tensor probabilities = shifted.exp_();
    at::Tensor sums = both[1];
    at::sum_out(sums, probabilities, 1, /*keepdim=*/true);
    all_reduce(both, group);
    const at::Tensor loss = (sums.log() - both[0]).mean();
    probabilities.div_(sums);
    probabilities.scatter_add_(1, index, elsewhere.logical_not().to(logits.scalar_type()).neg());
    ctx->save_for_backward({probabilities});
    return loss;
  }
  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const at::Tensor gradient = ctx->get_saved_variables()[0];
    return {gradient * (grads[0] / gradient.size(0)), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor summed_rows(const at::Tensor& terms, const Backend& group) {
  at::Tensor sent = terms.contiguous(), received = at::empty_like(sent);
  std::vector<int64_t> even;
  group->alltoall_base(received, sent, even, even)->wait();
  std::vector<int64_t> sizes = sent.sizes().vec();
  sizes[0] /= group->getSize();
  sizes.insert(sizes.begin(), group->getSize());
  return received.view(sizes).sum(0);
}

at::Tensor gather_sequence(const at::Tensor& x, const Backend& group) {
  return group == nullptr ? x : GatherSequence::apply(x, group);
}

at::Tensor sum_sequence(const at::Tensor& x, const Backend& group) {
  return group == nullptr ? x : SumSequence::apply(x, group);
}

at::Tensor cross_entropy_of_cut(const at::Tensor& logits, const at::Tensor& targets, const Backend& group) {
  return group == nullptr ? at::cross_entropy_loss(logits, targets) : CutCrossEntropy::apply(logits, targets, group);
}

}  // namespace tessera::bench
