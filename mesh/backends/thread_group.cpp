#include "tessera/mesh/backends/thread_group.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tessera/mesh/backends/collective_arguments.h"
#include "tessera/mesh/backends/rendezvous.h"
#include "tessera/mesh/core/in_memory.h"

namespace tessera {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class ThreadWork : public c10d::Work {
 public:
  ThreadWork(std::shared_ptr<Rendezvous> rendezvous, Rendezvous::EventPtr event, std::chrono::milliseconds timeout)
      : rendezvous_(std::move(rendezvous)), event_(std::move(event)), timeout_(timeout) {}

  bool isCompleted() override { return rendezvous_->is_done(*event_); }
  bool isSuccess() const override { return rendezvous_->is_done(*event_) && !rendezvous_->is_failed(*event_); }
  bool wait(std::chrono::milliseconds timeout) override {
    rendezvous_->wait(event_, timeout == kNoTimeout ? timeout_ : timeout);
    return true;
  }
  std::exception_ptr exception() const override {
    if (!rendezvous_->is_done(*event_) || !rendezvous_->is_failed(*event_)) return nullptr;
    try {
      rendezvous_->wait(event_, timeout_);
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }
  void synchronize() override {}

 private:
  const std::shared_ptr<Rendezvous> rendezvous_;
  const Rendezvous::EventPtr event_;
  const std::chrono::milliseconds timeout_;
};

// Collects the arguments of one rank, and the first fault in them.
class Builder {
 public:
  Builder(const char* kind, std::size_t size, c10::Device device) : size_(size), device_(device) { made_.kind = kind; }

  Builder& op(const c10d::ReduceOp& op) {
    made_.op = static_cast<c10d::ReduceOp::RedOpType>(op);
    return *this;
  }
  Builder& root(int64_t root) {
    made_.root = root;
    if (root < 0 || root >= static_cast<int64_t>(size_)) {
      fault(fmt::format("root {} is outside [0, {}); pass the position in the group", root, size_));
    }
    return *this;
  }
  // Adds each tensor as one buffer. `count` is how many there must be.
  Builder& give(const Tensors& tensors, std::size_t count) { return add(made_.give, tensors, count); }
  Builder& take(const Tensors& tensors, std::size_t count) { return add(made_.take, tensors, count); }
  // Adds the parts into which `counts` cut one tensor, a buffer for each.
  Builder& give_parts(const at::Tensor& tensor, const std::vector<int64_t>& counts) {
    return cut(made_.give, tensor, counts);
  }
  Builder& take_parts(const at::Tensor& tensor, const std::vector<int64_t>& counts) {
    return cut(made_.take, tensor, counts);
  }
  void fault(const std::string& text) {
    if (made_.fault.empty()) made_.fault = fmt::format("{}: {}", made_.kind, text);
  }
  // Returns how many elements each rank has of a tensor that `splits` cut along its first dimension, or equal parts if
  // `splits` is empty.
  std::vector<int64_t> counts(const at::Tensor& tensor, const std::vector<int64_t>& splits);

  CollectiveArguments done() {
    if (!made_.fault.empty()) {
      made_.give.clear();
      made_.take.clear();
    }
    return std::move(made_);
  }

 private:
  bool usable(const at::Tensor& tensor) {
    const bool fits =
        tensor.defined() && tensor.layout() == at::kStrided && tensor.device() == device_ && tensor.has_storage();
    if (!fits) {
      fault(fmt::format("a tensor of {} cannot be sent between threads; give a dense tensor on {}",
                        tensor.defined() ? tensor.toString() : "no type", device_.str()));
    }
    return fits;
  }
  Builder& add(std::vector<Buffer>& buffers, const Tensors& tensors, std::size_t count);
  Builder& cut(std::vector<Buffer>& buffers, const at::Tensor& tensor, const std::vector<int64_t>& counts);

  CollectiveArguments made_;
  const std::size_t size_;
  const c10::Device device_;
};

Builder& Builder::add(std::vector<Buffer>& buffers, const Tensors& tensors, std::size_t count) {
  if (tensors.size() != count) fault(fmt::format("{} tensors were given; give {}", tensors.size(), count));
  for (const at::Tensor& tensor : tensors) {
    if (usable(tensor)) buffers.push_back(whole_buffer(tensor));
  }
  return *this;
}

Builder& Builder::cut(std::vector<Buffer>& buffers, const at::Tensor& tensor, const std::vector<int64_t>& counts) {
  if (!usable(tensor)) return *this;
  if (!tensor.is_contiguous() || !is_in_memory(tensor)) fault("the tensor is not contiguous");
  int64_t offset = 0;
  for (const int64_t count : counts) {
    buffers.push_back({tensor, offset, count, false});
    offset += count;
  }
  if (offset != tensor.numel() || std::any_of(counts.begin(), counts.end(), [](int64_t count) { return count < 0; })) {
    fault(fmt::format("a tensor of {} elements does not hold [{}]", tensor.numel(), fmt::join(counts, ", ")));
  }
  return *this;
}

std::vector<int64_t> Builder::counts(const at::Tensor& tensor, const std::vector<int64_t>& splits) {
  if (!usable(tensor) || (tensor.dim() == 0 && splits.empty())) {
    fault("a tensor without dimensions cannot be split");
    return {};
  }
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const auto n = static_cast<int64_t>(size_);
  if (splits.empty() ? rows % n != 0 : splits.size() != size_) {
    fault(fmt::format("splits [{}] do not cut {} rows for {} ranks", fmt::join(splits, ", "), rows, n));
    return {};
  }
  std::vector<int64_t> counts = splits.empty() ? std::vector<int64_t>(size_, rows / n) : splits;
  const int64_t width = rows == 0 ? 0 : tensor.numel() / rows;
  if (std::accumulate(counts.begin(), counts.end(), int64_t{0}) != rows) {
    fault(fmt::format("splits [{}] do not sum to {} rows", fmt::join(counts, ", "), rows));
  }
  for (int64_t& count : counts) count *= width;
  return counts;
}

class ThreadBackend : public c10d::Backend {
 public:
  ThreadBackend(std::shared_ptr<Rendezvous> rendezvous, int rank, int size, c10::Device device,
                std::chrono::milliseconds timeout)
      : Backend(rank, size), rendezvous_(std::move(rendezvous)), device_(device), timeout_(timeout) {}

  const std::string getBackendName() const override { return "threads"; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Builder builder = start("broadcast");
    builder.root(options.rootRank).take(tensors, 1);
    if (getRank() == options.rootRank) builder.give(tensors, 1);
    return post(builder, options.timeout);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return post(start("all_reduce").op(options.reduceOp).give(tensors, 1).take(tensors, 1), options.timeout);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    Builder builder = start("reduce");
    builder.root(options.rootRank).op(options.reduceOp).give(tensors, 1);
    if (getRank() == options.rootRank) builder.take(tensors, 1);
    return post(builder, options.timeout);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    Builder builder = start("all_gather");
    builder.give(inputs, 1).take(only(builder, outputs), size());
    return post(builder, options.timeout);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    const std::vector<int64_t> counts(size(), input.numel());
    return post(start("all_gather").give_parts(input, {input.numel()}).take_parts(output, counts), options.timeout);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    Builder builder = start("gather");
    builder.root(options.rootRank).give(inputs, 1);
    if (getRank() == options.rootRank) builder.take(only(builder, outputs), size());
    return post(builder, options.timeout);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    Builder builder = start("scatter");
    builder.root(options.rootRank).take(outputs, 1);
    if (getRank() == options.rootRank) builder.give(only(builder, inputs), size());
    return post(builder, options.timeout);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    Builder builder = start("reduce_scatter");
    builder.op(options.reduceOp).give(only(builder, inputs), size()).take(outputs, 1);
    return post(builder, options.timeout);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    const std::vector<int64_t> counts(size(), output.numel());
    return post(
        start("reduce_scatter").op(options.reduceOp).give_parts(input, counts).take_parts(output, {output.numel()}),
        options.timeout);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& receive,
                        std::vector<int64_t>& send, const c10d::AllToAllOptions& options) override {
    Builder builder = start("all_to_all");
    builder.give_parts(input, builder.counts(input, send)).take_parts(output, builder.counts(output, receive));
    return post(builder, options.timeout);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return post(start("all_to_all").give(inputs, size()).take(outputs, size()), options.timeout);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    Builder builder = start("barrier");
    return post(builder, options.timeout);
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return work(rendezvous_->send(getRank(), peer(to), tag, message(tensors)), c10d::kUnsetTimeout);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return work(rendezvous_->receive(getRank(), peer(from), tag, message(tensors)), c10d::kUnsetTimeout);
  }

 private:
  std::size_t size() const { return static_cast<std::size_t>(getSize()); }
  Builder start(const char* kind) const { return {kind, size(), device_}; }

  // c10d's lists have one list per device of this rank, of which there is one.
  static const Tensors& only(Builder& builder, const std::vector<Tensors>& lists) {
    static const Tensors none;
    if (lists.size() == 1) return lists.front();
    builder.fault(fmt::format("{} lists of tensors were given; give one", lists.size()));
    return none;
  }
  WorkPtr post(Builder& builder, std::chrono::milliseconds timeout) {
    return work(rendezvous_->join(getRank(), builder.done()), timeout);
  }
  WorkPtr work(Rendezvous::EventPtr event, std::chrono::milliseconds timeout) const {
    return c10::make_intrusive<ThreadWork>(rendezvous_, std::move(event),
                                           timeout == c10d::kUnsetTimeout ? timeout_ : timeout);
  }
  int peer(int rank) const {
    if (rank >= 0 && rank < getSize()) return rank;
    throw std::invalid_argument(fmt::format(
        "rank {} is outside [0, {}); pass the position in the group, not the global rank", rank, getSize()));
  }
  Buffer message(const Tensors& tensors) const {
    Builder builder = start("a message");
    const CollectiveArguments made = builder.give(tensors, 1).done();
    if (!made.fault.empty()) throw std::invalid_argument(made.fault);
    return made.give.front();
  }

  const std::shared_ptr<Rendezvous> rendezvous_;
  const c10::Device device_;
  std::chrono::milliseconds timeout_;
};

}  // namespace

std::shared_ptr<Rendezvous> ThreadHub::rendezvous(const std::vector<int64_t>& ranks, c10::Device device) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Rendezvous>& found = rendezvous_of_[{ranks, device.type()}];
  if (found) return found;
  found = std::make_shared<Rendezvous>(ranks, device);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (left_.contains(ranks[i])) found->leave(static_cast<int>(i));
  }
  return found;
}

void ThreadHub::leave(int64_t rank) {
  const std::lock_guard lock(mutex_);
  left_.insert(rank);
  for (const auto& [key, rendezvous] : rendezvous_of_) {
    const auto& ranks = key.first;
    const auto place = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
    if (place < static_cast<int64_t>(ranks.size())) rendezvous->leave(static_cast<int>(place));
  }
}

BackendGroup make_thread_group(const std::shared_ptr<ThreadHub>& hub, const GroupRequest& request) {
  const c10::Device device(request.device, static_cast<c10::DeviceIndex>(request.device_index));
  const std::shared_ptr<Rendezvous> rendezvous = hub->rendezvous(request.ranks, device);
  return {
      .backend = c10::make_intrusive<ThreadBackend>(rendezvous, request.rank, request.size, device, request.timeout),
      .close = [rendezvous] { rendezvous->close(); },
      .closes_while_busy = true};
}

}  // namespace tessera
