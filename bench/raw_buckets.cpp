#include "tessera/bench/raw_buckets.h"

#include <algorithm>

#include <ATen/ops/empty.h>
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
    for (std::size_t i = 0; i < bucket.slots.size(); ++i) {
      bucket.slots[i].parameter.register_hook([this, &bucket, i](const at::Tensor& g) { take(bucket, i, g); });
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

void RawBuckets::take(Bucket& bucket, std::size_t slot, const at::Tensor& gradient) {
  bucket.slots[slot].view.copy_(gradient);
  if (--bucket.missing > 0) return;
  std::vector<at::Tensor> tensors = {bucket.flat};
  bucket.work = group_->allreduce(tensors);
}

void RawBuckets::finish() {
  for (Bucket& bucket : buckets_) {
    bucket.work->wait();
    bucket.work.reset();
    bucket.flat.div_(group_->getSize());
    bucket.missing = bucket.slots.size();
    for (Slot& slot : bucket.slots) slot.parameter.mutable_grad() = slot.view;
  }
}

}  // namespace tessera::bench
