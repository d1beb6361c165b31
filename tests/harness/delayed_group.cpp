#include "tessera/tests/harness/delayed_group.h"

#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tessera/mesh/backends/backend_group.h"
#include "tessera/mesh/backends/thread_group.h"

namespace tessera::testing {
namespace {

using Clock = std::chrono::steady_clock;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Is done when `inner` is done, but not before `ready`.
class DelayedWork : public c10d::Work {
 public:
  DelayedWork(WorkPtr inner, Clock::time_point ready, std::function<void()> came)
      : inner_(std::move(inner)), ready_(ready), came_(std::move(came)) {}

  bool isCompleted() override { return inner_->isCompleted() && Clock::now() >= ready_; }
  bool isSuccess() const override { return inner_->isSuccess() && Clock::now() >= ready_; }
  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = inner_->wait(timeout);
    std::this_thread::sleep_until(ready_);
    came_();
    return done;
  }
  std::exception_ptr exception() const override { return inner_->exception(); }
  void synchronize() override { inner_->synchronize(); }

 private:
  const WorkPtr inner_;
  const Clock::time_point ready_;
  const std::function<void()> came_;
};

int64_t bytes_of(const Tensors& tensors) {
  int64_t out = 0;
  for (const at::Tensor& each : tensors) out += static_cast<int64_t>(each.nbytes());
  return out;
}

class DelayedBackend : public c10d::Backend {
 public:
  DelayedBackend(c10::intrusive_ptr<c10d::Backend> inner, const DelayedOptions& options)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)), options_(options) {}

  const std::string getBackendName() const override { return inner_->getBackendName(); }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return inner_->broadcast(tensors, options);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override { return inner_->barrier(options); }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return later("all_reduce", bytes_of(tensors), [&] { return inner_->allreduce(tensors, options); });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return later("all_gather", bytes_of(inputs), [&] { return inner_->allgather(outputs, inputs, options); });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return later("all_gather", bytes_of({input}), [&] { return inner_->_allgather_base(output, input, options); });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    const int64_t bytes = inputs.empty() ? 0 : bytes_of(inputs.front());
    return later("reduce_scatter", bytes, [&] { return inner_->reduce_scatter(outputs, inputs, options); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return later("reduce_scatter", bytes_of({input}),
                 [&] { return inner_->_reduce_scatter_base(output, input, options); });
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    return later("all_to_all", bytes_of({input}),
                 [&] { return inner_->alltoall_base(output, input, output_splits, input_splits, options); });
  }

 private:
  template <class Begin>
  WorkPtr later(const std::string& kind, int64_t bytes, const Begin& begin) {
    options_.on_event(kind + " begins");
    const Clock::time_point ready = Clock::now() + options_.delay(bytes);
    return c10::make_intrusive<DelayedWork>(begin(), ready, [kind, tell = options_.on_event] { tell(kind + " came"); });
  }

  const c10::intrusive_ptr<c10d::Backend> inner_;
  const DelayedOptions options_;
};

std::shared_ptr<World> delayed_world(int64_t rank, int64_t size, const c10::intrusive_ptr<c10d::Store>& store,
                                     const std::shared_ptr<ThreadHub>& hub, const DelayedOptions& options) {
  WorldOptions one;
  one.rank = one.local_rank = rank;
  one.size = one.local_size = size;
  one.store = store;
  one.make_group = [hub, options](const GroupRequest& request) {
    const BackendGroup inner = make_thread_group(hub, request);
    return BackendGroup{c10::make_intrusive<DelayedBackend>(inner.backend, options), inner.close};
  };
  return World::create(std::move(one));
}

}  // namespace

void run_delayed(int64_t size, const DelayedOptions& options,
                 const std::function<void(const std::shared_ptr<World>&)>& body) {
  const auto hub = std::make_shared<ThreadHub>();
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(delayed_world(rank, size, store, hub, options));
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
      hub->leave(rank);
    });
  }
  for (std::thread& each : threads) each.join();
  for (const std::exception_ptr& each : errors) {
    if (each) std::rethrow_exception(each);
  }
}

}  // namespace tessera::testing
