// c10d's own FakeProcessGroup.hpp cannot be used here: it includes Python.h.
#include "tessera/mesh/backends/backend_group.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace tessera {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class FakeWork : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
};

// This backend's collectives move nothing. Where pieces are even, what is gathered is as if every rank had this rank's
// input, and a reduction leaves this rank's terms; other outputs are filled with zeros, so that later code sees valid
// numbers.
class FakeBackend : public c10d::Backend {
 public:
  FakeBackend(int rank, int size) : Backend(rank, size) {}
  const std::string getBackendName() const override { return "fake"; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    if (options.rootRank != getRank()) zero(tensors);
    return done();
  }
  WorkPtr allreduce(Tensors&, const c10d::AllreduceOptions&) override { return done(); }
  WorkPtr reduce(Tensors&, const c10d::ReduceOptions&) override { return done(); }
  WorkPtr barrier(const c10d::BarrierOptions&) override { return done(); }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      Tensors& gathered = outputs.at(i);
      const bool even =
          std::ranges::all_of(gathered, [&](const at::Tensor& t) { return t.sizes() == inputs[i].sizes(); });
      if (!even) {
        zero(gathered);
        continue;
      }
      for (at::Tensor& output : gathered) output.copy_(inputs[i]);
    }
    return done();
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    const std::size_t bytes = input.nbytes();
    if (output.nbytes() != static_cast<std::size_t>(getSize()) * bytes) {
      throw std::invalid_argument(fmt::format(
          "_allgather_base of {} ranks in a fake world: an input of {} bytes does not fill an output of {}; "
          "give one of {} bytes",
          getSize(), bytes, output.nbytes(), static_cast<std::size_t>(getSize()) * bytes));
    }
    if (!output.is_cpu() || !output.is_contiguous() || !input.is_contiguous()) {
      output.view({getSize(), -1}).copy_(input.reshape({1, -1}).expand({getSize(), -1}));
      return done();
    }
    if (bytes == 0) return done();
    auto* to = static_cast<char*>(output.mutable_data_ptr());
    const void* const from = input.const_data_ptr();
    for (int i = 0; i < getSize(); ++i, to += bytes) std::memcpy(to, from, bytes);
    return done();
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors&, const c10d::GatherOptions&) override {
    for (Tensors& list : outputs) zero(list);
    return done();
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>&, const c10d::ScatterOptions&) override {
    zero(outputs);
    return done();
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>&, const c10d::ReduceScatterOptions&) override {
    zero(outputs);
    return done();
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor&, const c10d::ReduceScatterOptions&) override {
    zero(output);
    return done();
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
                        const c10d::AllToAllOptions&) override {
    zero(output);
    return done();
  }
  WorkPtr send(Tensors&, int, int) override { return done(); }
  WorkPtr recv(Tensors& tensors, int, int) override {
    zero(tensors);
    return done();
  }

 private:
  static WorkPtr done() { return c10::make_intrusive<FakeWork>(); }
  static void zero(Tensors& tensors) {
    for (at::Tensor& tensor : tensors) zero(tensor);
  }
  static void zero(at::Tensor& tensor) {
    if (!tensor.is_cpu() || !tensor.is_contiguous()) {
      tensor.zero_();
    } else if (tensor.nbytes() > 0) {
      std::memset(tensor.mutable_data_ptr(), 0, tensor.nbytes());
    }
  }
};

}  // namespace

BackendGroup make_fake_group(int rank, int size) {
  return {.backend = c10::make_intrusive<FakeBackend>(rank, size), .close = [] {}};
}

}  // namespace tessera
