#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include "tessera/dtensor/arriving_gradients.h"
#include "tessera/dtensor/bucket_layouts.h"
#include "tessera/dtensor/bucket_memory.h"
#include "tessera/dtensor/bucket_plan.h"
#include "tessera/dtensor/bucketed_grad.h"
#include "tessera/dtensor/gradient.h"
#include "tessera/dtensor/redistribute/async_redistributions.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

namespace tessera {

// Reduces gradients in buckets as bucket_gradients promises. A pass is a backward that reduces; one under
// AccumulateGradients only adds up.
//
// Invariant: all ranks have the same plan, and start and wait for their buckets in the same order. Of what the plan
// follows, the ranks compare the order in which gradients come; parameters have the same dtype and requires_grad on
// every rank, and every rank sees that there is a pass, or a backward that only adds up.
class BucketReducer final : public detail::GradientReducer, public std::enable_shared_from_this<BucketReducer> {
 public:
  // `layouts` are those of `parameters`, whose gradients have a sum pending on the mesh dimensions `data_dims`. Does
  // not communicate.
  BucketReducer(BucketLayouts layouts, const std::vector<at::Tensor>& parameters, const std::vector<int64_t>& data_dims,
                int64_t bucket_bytes);

  Outcome take(std::size_t index, at::Tensor& gradient) override;
  const Placements& layout(std::size_t index) const override { return layouts_.parameter(index).layout; }

 private:
  struct Parameter {
    BucketedGrad grad;
    bool is_trained = false;  // a gradient may come, so that the plan may have it
    bool is_watched = false;  // the ranks have compared the gradients of a pass in which it was trained
    bool is_placed = false;   // some rank had a gradient of it in such a pass, or was late in the one before
    bool is_late = false;     // some rank had the first one in a pass that was not watched: the next one is
    // These are of the pass that runs:
    at::Tensor gradient;  // the sum of those that have come, with what is pending
    int64_t arrivals = 0;
    bool is_packed = false;      // the sum is in its bucket's memory, and `gradient` is undefined
    bool is_kept_taken = false;  // take_kept() was called
    // These are the plan's, which may not have the parameter:
    const ArrivingGradient* planned = nullptr;
    std::size_t bucket = 0;
  };
  struct Bucket {
    ArrivalOrder gradients;
    BucketLayouts::Flags flags;
    std::vector<double> there;  // for each gradient, 1 if this rank has it in this pass, else 0
    std::size_t missing = 0;    // the number of its gradients that have not all come in this pass
    // Takes each gradient when it is complete, and last the flags; empty unless the bucket is all-reduced as it is.
    std::optional<BucketMemory> memory;
    std::shared_ptr<AsyncRedistributions> running;
  };

  at::Tensor in_layout_before(const ArrivingGradient& planned, const at::Tensor& gradient) const;
  at::Tensor take_kept(std::size_t index);
  void add_kept(std::size_t index, at::Tensor& gradient);

  void begin_adding();
  void begin_pass();
  bool follow_parameters();
  bool learn_order();
  void pend_over_data(std::string& pending) const;
  // Says whether a data dimension has several ranks.
  bool reduces() const { return over_data_.find(kPendingSum) != std::string::npos; }
  void note(std::size_t index, const std::string& pending);
  void make_plan();
  void add_term(Parameter& parameter, const at::Tensor& gradient);
  void start_complete_buckets(bool all);
  void start(Bucket& bucket);
  std::vector<AsyncRedistributions::Item> items_of(Bucket& bucket);
  at::Tensor piece_to_send(const Parameter& parameter, const Spec& from) const;
  at::Tensor flags_to_send(const Spec& flags, const std::vector<double>& there) const;
  void end_pass();
  void deliver(Bucket& bucket);
  void store(const Bucket& bucket, const std::vector<at::Tensor>& pieces);
  void note_arrival(Parameter& parameter) const;
  void store(std::size_t index, const at::Tensor& piece) const;
  void forget_pass();

  const DeviceMesh mesh_;
  const int64_t bucket_bytes_;
  std::string over_data_;  // what data parallelism alone leaves pending
  BucketLayouts layouts_;
  std::vector<Parameter> parameters_;
  // Lists all parameters: first those whose order the ranks have compared, then the others, from the last to the first
  // and with what data parallelism alone leaves pending.
  ArrivalOrder order_;
  enum class Learning { kDone, kWatching, kSeen } learning_ = Learning::kDone;
  ArrivalOrder seen_;  // in the pass that is watched, or was
  std::vector<Bucket> buckets_;
  std::weak_ptr<bool> running_;    // there while a pass runs
  std::weak_ptr<bool> adding_;     // there while a backward runs that only adds up
  bool plan_is_old_ = false;       // such a backward has found other parameters
  std::size_t next_bucket_ = 0;    // the first that has not been started in this pass
  std::size_t next_delivery_ = 0;  // the first that has not been waited for
  // Is set by a backward that only adds up, until a pass has ended. A .grad may then have terms on some ranks and a
  // reduced value on others.
  bool has_kept_ = false;
  // Takes all gradients of a pass: where forward was on several streams, they come on these. Empty before the first.
  std::optional<c10::Stream> stream_;
};

}  // namespace tessera
