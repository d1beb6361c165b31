#include "tessera/bench/raw_shards.h"

#include <utility>

#include <ATen/native/Resize.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/dtensor/saved.h"

namespace tessera::bench {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

struct BackwardCall : torch::autograd::Function<BackwardCall> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, std::function<void()> call) {
    detail::saved<std::function<void()>>(ctx, "call") = std::move(call);
    return at::alias(x);
  }
  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    detail::saved<std::function<void()>>(ctx, "call")();
    return {grads[0], at::Tensor()};
  }
};

void resize_memory(const at::Tensor& tensor, std::size_t bytes) {
  at::native::resize_bytes_cpu(tensor.storage().unsafeGetStorageImpl(), bytes);
}

}  // namespace

RawShards::RawShards(const std::vector<at::Tensor>& values, c10::intrusive_ptr<c10d::Backend> group)
    : group_(std::move(group)) {
  const c10::AutoGradMode no_gradient(false);
  int64_t count = 0;
  for (const at::Tensor& each : values) count += each.numel();
  const int64_t n = group_->getSize(), piece = (count + n - 1) / n;
  full_ = at::zeros({n * piece}, values[0].options());
  int64_t begin = 0;
  for (const at::Tensor& each : values) {
    const at::Tensor view = full_.narrow(0, begin, each.numel()).view(each.sizes());
    view.copy_(each);
    begin += each.numel();
    // Writes to `full_` do not count as writes to this one, which autograd would refuse to have saved.
    parameters_.push_back(view.variable_data().set_requires_grad(true));
  }
  shard_ = full_.narrow(0, group_->getRank() * piece, piece).clone().set_requires_grad(true);
  free();
}

void RawShards::begin_gather() {
  if (is_gathered_ || gathering_ != nullptr) return;
  const c10::AutoGradMode no_gradient(false);
  resize_memory(full_, static_cast<std::size_t>(full_.numel()) * full_.itemsize());
  at::Tensor piece = shard_.detach();
  gathering_ = group_->_allgather_base(full_, piece);
}

void RawShards::finish_gather() {
  begin_gather();
  if (gathering_ != nullptr) gathering_->wait();
  gathering_.reset();
  is_gathered_ = true;
}

void RawShards::free() {
  resize_memory(full_, 0);
  is_gathered_ = false;
}

void RawShards::begin_reduce() {
  const c10::AutoGradMode no_gradient(false);
  gradient_ = at::empty_like(full_);
  int64_t begin = 0;
  for (at::Tensor& each : parameters_) {
    gradient_.narrow(0, begin, each.numel()).view(each.sizes()).copy_(each.grad());
    each.mutable_grad().reset();
    begin += each.numel();
  }
  gradient_.narrow(0, begin, gradient_.numel() - begin).zero_();
  received_ = at::empty_like(gradient_);
  std::vector<int64_t> even;
  reducing_ = group_->alltoall_base(received_, gradient_, even, even);
  free();
}

void RawShards::finish_reduce() {
  reducing_->wait();
  reducing_.reset();
  gradient_.reset();
  shard_.mutable_grad() = std::exchange(received_, {}).view({group_->getSize(), -1}).sum(0);
}

at::Tensor with_backward_call(const at::Tensor& x, std::function<void()> before_rest) {
  return BackwardCall::apply(x, std::move(before_rest));
}

}  // namespace tessera::bench
