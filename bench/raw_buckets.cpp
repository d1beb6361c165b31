#include "tessera/bench/raw_buckets.h"

#include <memory>

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace tessera::bench {

RawBuckets::RawBuckets(const std::vector<at::Tensor>& parameters, c10::intrusive_ptr<c10d::Backend> group)
    : group_(std::move(group)) {
  constexpr std::size_t kBytes = std::size_t{25} << 20;
  std::vector<at::Tensor> next;
  std::size_t bytes = 0;
  // Gradients come in about the opposite order.
  for (auto each = parameters.rbegin(); each != parameters.rend(); ++each) {
    if (!next.empty() && bytes + each->nbytes() > kBytes) {
      add_bucket(std::exchange(next, {}));
      bytes = 0;
    }
    next.push_back(*each);
    bytes += each->nbytes();
  }
  if (!next.empty()) add_bucket(std::move(next));
  for (Bucket& bucket : buckets_) {
    for (const Slot& slot : bucket.slots) {
      const auto hook = [this, &bucket, &slot](const auto& outputs, const auto&) {
        take(bucket, slot);
        return outputs;
      };
      const auto node = torch::autograd::impl::grad_accumulator(slot.parameter);
      node->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(hook));
      accumulators_.push_back(node);
    }
  }
}

void RawBuckets::add_bucket(std::vector<at::Tensor> parameters) {
  int64_t count = 0;
  for (const at::Tensor& each : parameters) count += each.numel();
  Bucket bucket{.flat = at::empty({count}, parameters[0].options().requires_grad(false)), .slots = {}, .work = {}};
  int64_t begin = 0;
  for (at::Tensor& each : parameters) {
    const at::Tensor view = bucket.flat.narrow(0, begin, each.numel()).view(each.sizes()).variable_data();
    begin += each.numel();
    bucket.slots.push_back({std::move(each), view});
  }
  bucket.missing = bucket.slots.size();
  buckets_.push_back(std::move(bucket));
}

void RawBuckets::take(Bucket& bucket, const Slot& slot) {
  at::Tensor& gradient = slot.parameter.mutable_grad();
  slot.view.copy_(gradient);
  gradient = slot.view;
  if (--bucket.missing > 0) return;
  std::vector<at::Tensor> tensors = {bucket.flat};
  bucket.work = group_->allreduce(tensors);
}

void RawBuckets::finish() {
  for (Bucket& bucket : buckets_) {
    bucket.work->wait();
    bucket.work.reset();
    bucket.missing = bucket.slots.size();
  }
}

}  // namespace tessera::bench
