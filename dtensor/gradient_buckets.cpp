#include "tessera/dtensor/gradient_buckets.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/ceil_div.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/util/intrusive_ptr.h>
#include <fmt/format.h>

#include "tessera/dtensor/arriving_gradients.h"
#include "tessera/dtensor/bucket_memory.h"
#include "tessera/dtensor/bucket_plan.h"
#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/gradient.h"
#include "tessera/dtensor/redistribute/async_redistributions.h"
#include "tessera/dtensor/redistribute/route.h"
#include "tessera/mesh/core/first_stream.h"

namespace tessera {
namespace {

// Returns the plan's collectives with their mesh dimensions, such as " reduce_scatter,1 all_reduce,0".
std::string collectives_of(const Plan& plan) {
  std::string out;
  for (const PlanStep& step : plan.steps()) {
    if (step.kind == PlanStep::Kind::kLocal) continue;
    out += fmt::format(" {}", to_string(step.kind));
    for (const int64_t dim : step.mesh_dims) out += fmt::format(",{}", dim);
  }
  return out;
}

class GradientBuckets final : public detail::GradientReducer, public std::enable_shared_from_this<GradientBuckets> {
 public:
  GradientBuckets(const std::vector<BucketedParameter>& parameters, const std::vector<int64_t>& data_dims,
                  const GradientBucketOptions& options)
      : mesh_(mesh_of(parameters.front().parameter)), options_(options) {
    std::string pending(static_cast<std::size_t>(mesh_.ndim()), kNothingPending);
    for (const int64_t dim : data_dims) {
      if (mesh_.size(dim) > 1) pending[static_cast<std::size_t>(dim)] = kPendingSum;
    }
    for (const BucketedParameter& each : parameters) {
      guess_.push_back({.parameter = parameters_.size(), .pending = pending});
      parameters_.push_back({.impl = c10::weak_intrusive_ptr<c10::TensorImpl>(each.parameter.getIntrusivePtr()),
                             .sizes = each.parameter.sizes().vec(),
                             .dtype = each.parameter.scalar_type(),
                             .layout = each.gradient});
    }
    std::ranges::reverse(guess_);
    make_plan({guess_});
  }

  Outcome take(std::size_t index, at::Tensor& gradient) override;
  const Placements& layout(std::size_t index) const override { return parameters_[index].layout; }

 private:
  struct Parameter {
    c10::weak_intrusive_ptr<c10::TensorImpl> impl;
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    Placements layout;  // of its gradient in the end
    // These are of the pass that runs:
    at::Tensor gradient;  // the sum of those that have come, with what is pending
    int64_t arrivals = 0;
    bool is_packed = false;  // the sum is in its bucket's memory, and `gradient` is undefined
    // These are the plan's, which may not have the parameter:
    const ArrivingGradient* planned = nullptr;
    std::size_t bucket = 0;
  };
  // Says which ranks have a gradient: a column of flags per gradient of a bucket, and empty columns, laid out so that
  // the bucket's own collectives reduce it.
  struct Flags {
    SpecPtr from;
    Placements to;
  };
  struct Bucket {
    ArrivalOrder gradients;
    Flags flags;
    std::vector<double> there;  // for each gradient, 1 if this rank has it in this pass, else 0
    std::size_t missing = 0;    // the number of its gradients that have not all come in this pass
    // Takes each gradient when it is complete, and last the flags; empty unless the bucket is all-reduced as it is.
    std::optional<BucketMemory> memory;
    std::shared_ptr<AsyncRedistributions> running;
  };

  at::Tensor tensor_of(const Parameter& parameter) const;
  at::ScalarType sent_dtype(const Parameter& parameter) const {
    return c10::isComplexType(parameter.dtype) ? parameter.dtype : options_.dtype.value_or(parameter.dtype);
  }
  SpecPtr spec_before(const Parameter& parameter, const std::string& pending) const {
    return intern_spec(mesh_, before_reduction(parameter.layout, pending), parameter.sizes, sent_dtype(parameter));
  }
  at::Tensor in_layout_before(const Parameter& parameter, const at::Tensor& gradient) const;
  RoutePtr route(const Spec& from, const Placements& to) const { return bucket_route(from, to, options_.cost_model); }
  RoutePtr route_of(const ArrivingGradient& gradient) const;
  std::string kind_of(const ArrivingGradient& gradient) const;
  int64_t bytes_of(const ArrivingGradient& gradient) const;
  // Takes the terms of earlier passes, which AccumulateGradients has left in .grad.
  at::Tensor take_kept(const Parameter& parameter) const;
  void keep(const Parameter& parameter, const at::Tensor& gradient) const;

  void begin_pass();
  // Learns the dtypes of parameters that a call such as module->to(dtype) has changed.
  void follow_dtypes();
  // Makes the buckets, for orders of which the earlier ones count more.
  void make_plan(std::vector<ArrivalOrder> orders);
  void note(std::size_t index, const std::string& pending);
  void start_complete_buckets(bool all);
  void start(Bucket& bucket);
  std::optional<BucketMemory> memory_of(const Bucket& bucket) const;
  // Moves the sum of the parameter's gradients to its bucket's memory, if that takes it.
  void pack(Parameter& parameter);
  // Returns what the bucket sends of the parameter: zeros if it has no gradient.
  at::Tensor piece_to_send(const Parameter& parameter, const Spec& from) const;
  at::Tensor flags_to_send(const Spec& flags, const std::vector<double>& there) const;
  void end_pass();
  void deliver(Bucket& bucket);
  void store(const Parameter& parameter, const at::Tensor& piece) const;
  void forget_pass();

  Flags flags_of(const ArrivalOrder& gradients) const;

  const DeviceMesh mesh_;
  const GradientBucketOptions options_;
  std::vector<Parameter> parameters_;
  // Lists all parameters from the last to the first, with what data parallelism alone leaves pending. The first pass
  // and parameters that have no gradient in it follow this.
  ArrivalOrder guess_;
  ArrivalOrder seen_;                 // in the first pass
  std::vector<ArrivalOrder> orders_;  // those of the plan
  enum class Order { kGuessed, kSeen, kAgreed } order_ = Order::kGuessed;
  std::vector<Bucket> buckets_;
  std::weak_ptr<bool> running_;    // there while a pass runs
  std::size_t next_bucket_ = 0;    // the first that has not been started in this pass
  std::size_t next_delivery_ = 0;  // the first that has not been waited for
  // Takes all gradients of a pass: where forward was on several streams, they come on these. Empty before the first.
  std::optional<c10::Stream> stream_;
};

at::Tensor GradientBuckets::tensor_of(const Parameter& parameter) const { return at::Tensor(parameter.impl.lock()); }

// Returns the gradient of a planned parameter in the layout in which its bucket reduces it. This costs a collective
// only where the gradient is cut in another way than its parameter, or more is pending than the plan says.
at::Tensor GradientBuckets::in_layout_before(const Parameter& parameter, const at::Tensor& gradient) const {
  const Placements wanted = before_reduction(parameter.layout, parameter.planned->pending);
  return placements_of(gradient) == wanted ? gradient : redistribute(gradient, wanted);
}

RoutePtr GradientBuckets::route_of(const ArrivingGradient& gradient) const {
  const Parameter& parameter = parameters_[gradient.parameter];
  return route(*spec_before(parameter, gradient.pending), parameter.layout);
}

std::string GradientBuckets::kind_of(const ArrivingGradient& gradient) const {
  const RoutePtr route = route_of(gradient);
  if (!route->communicates()) return "";
  return fmt::format("{} {}{}", c10::toString(sent_dtype(parameters_[gradient.parameter])), gradient.pending,
                     collectives_of(route->plan()));
}

int64_t GradientBuckets::bytes_of(const ArrivingGradient& gradient) const {
  const SpecPtr spec = spec_before(parameters_[gradient.parameter], gradient.pending);
  return bytes_of_even_piece(*spec, spec->placements);
}

at::Tensor GradientBuckets::take_kept(const Parameter& parameter) const {
  const at::Tensor tensor = tensor_of(parameter);
  if (!tensor.defined()) return {};
  at::Tensor& grad = tensor.mutable_grad();
  if (!is_dtensor(grad) || placements_of(grad) == parameter.layout) return {};
  return std::exchange(grad, at::Tensor());
}

// Lets autograd add `gradient` to .grad without communication: what is there and reduced already becomes a term.
void GradientBuckets::keep(const Parameter& parameter, const at::Tensor& gradient) const {
  const at::Tensor tensor = tensor_of(parameter);
  at::Tensor& grad = tensor.mutable_grad();
  if (grad.defined() && placements_of(grad) != placements_of(gradient)) {
    grad = redistribute(grad, placements_of(gradient));
  }
}

detail::GradientReducer::Outcome GradientBuckets::take(std::size_t index, at::Tensor& gradient) {
  const detail::Explicit asked_for;
  const World::Scope scope(mesh_.world(), "gradient");
  Parameter& parameter = parameters_[index];
  if (mesh_.world().gradient_accumulations() > 0) {
    keep(parameter, gradient);
    return Outcome::kKeep;
  }
  begin_pass();
  if (const at::Tensor kept = take_kept(parameter); kept.defined()) gradient = kept + gradient;
  const std::optional<std::string> pending = pending_in(placements_of(gradient), mesh_);
  if (pending && order_ == Order::kGuessed) note(index, *pending);
  const bool in_time = parameter.planned != nullptr && parameter.arrivals < parameter.planned->arrivals;
  if (!pending || !in_time) return Outcome::kReduceNow;
  std::optional<OnFirstStream> one_stream;
  if (!mesh_.world().is_fake()) {
    one_stream.emplace(stream_, mesh_.device());
    one_stream->keep(detail::meta(gradient).local());
  }
  const at::Tensor term = in_layout_before(parameter, gradient);
  parameter.gradient = parameter.gradient.defined() ? parameter.gradient + term : term;
  if (++parameter.arrivals == parameter.planned->arrivals) {
    pack(parameter);
    --buckets_[parameter.bucket].missing;
    start_complete_buckets(/*all=*/false);
  }
  return Outcome::kTaken;
}

// Moves the parameter to the end of the order that this pass shows.
void GradientBuckets::note(std::size_t index, const std::string& pending) {
  ArrivingGradient now{.parameter = index, .pending = pending};
  const auto before = std::ranges::find(seen_, index, &ArrivingGradient::parameter);
  if (before != seen_.end()) {
    now = {.parameter = index, .pending = before->pending, .arrivals = before->arrivals + 1};
    seen_.erase(before);
  }
  seen_.push_back(now);
}

// Forgets what a pass that threw has left, and sees to the end of this one.
void GradientBuckets::begin_pass() {
  if (!running_.expired()) return;  // also in a backward within the one that runs, which belongs to it
  forget_pass();
  follow_dtypes();
  if (order_ == Order::kGuessed) seen_.clear();
  if (order_ == Order::kSeen && options_.bucket_bytes > 0) {
    std::vector<ArrivalOrder> orders = orders_of_all(mesh_, seen_);
    orders.push_back(guess_);
    make_plan(std::move(orders));
    order_ = Order::kAgreed;
  }
  // The pass runs as long as autograd keeps the callback, also if it throws.
  const auto running = std::make_shared<bool>();
  running_ = running;
  detail::at_end_of_backward([self = shared_from_this(), running] { self->end_pass(); });
}

void GradientBuckets::follow_dtypes() {
  bool changed = false;
  for (Parameter& each : parameters_) {
    const at::Tensor tensor = tensor_of(each);
    if (!tensor.defined() || tensor.scalar_type() == each.dtype) continue;
    each.dtype = tensor.scalar_type();
    changed = true;
  }
  if (changed) make_plan(orders_);
}

void GradientBuckets::forget_pass() {
  for (Parameter& each : parameters_) {
    each.gradient = at::Tensor();
    each.arrivals = 0;
    each.is_packed = false;
  }
  for (Bucket& bucket : buckets_) {
    bucket.missing = bucket.gradients.size();
    bucket.running = nullptr;
    if (bucket.memory) bucket.memory->release();
  }
  next_bucket_ = 0;
  next_delivery_ = 0;
  stream_.reset();
  running_.reset();
}

// Starts buckets in their order, up to the first that misses a gradient. At most two are under way, since each holds
// what it sends: so every rank starts and waits in the same sequence.
void GradientBuckets::start_complete_buckets(bool all) {
  while (next_bucket_ < buckets_.size() && (all || buckets_[next_bucket_].missing == 0)) {
    if (next_bucket_ >= next_delivery_ + 2) deliver(buckets_[next_delivery_++]);
    start(buckets_[next_bucket_++]);
  }
}

GradientBuckets::Flags GradientBuckets::flags_of(const ArrivalOrder& gradients) const {
  const ArrivingGradient& first = gradients.front();
  const Parameter& parameter = parameters_[first.parameter];
  int64_t sections = 1;
  Placements from(static_cast<std::size_t>(mesh_.ndim()), Replicate()), to = from;
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (first.pending[i] == kNothingPending) continue;
    from[i] = before_reduction(parameter.layout, first.pending)[i];
    if (!parameter.layout[i].is_shard()) continue;
    to[i] = Shard(0);
    sections *= mesh_.size(static_cast<int64_t>(i));
  }
  const auto flags = [&](int64_t columns) {
    return Flags{.from = intern_spec(mesh_, from, {sections, columns}, sent_dtype(parameter)), .to = to};
  };
  const int64_t count = std::ssize(gradients);
  Flags out = flags(count);
  // A plan that scatters columns over mesh dimensions must find as many for each rank.
  const std::string wanted = collectives_of(route_of(first)->plan());
  if (collectives_of(route(*out.from, to)->plan()) == wanted) return out;
  return flags(at::ceil_div(count, mesh_.size()) * mesh_.size());
}

// Packing at once lets the next gradient have the memory of this one, which the caches still hold.
void GradientBuckets::pack(Parameter& parameter) {
  Bucket& bucket = buckets_[parameter.bucket];
  if (!bucket.memory) return;
  const auto place = static_cast<std::size_t>(parameter.planned - bucket.gradients.data());
  bucket.memory->part(place).copy_(detail::meta(parameter.gradient).local());
  parameter.gradient = at::Tensor();
  parameter.is_packed = true;
}

at::Tensor GradientBuckets::piece_to_send(const Parameter& parameter, const Spec& from) const {
  if (parameter.gradient.defined()) return detail::meta(parameter.gradient).local().to(from.dtype);
  return at::zeros(from.local_sizes, at::TensorOptions().device(mesh_.device()).dtype(from.dtype));
}

// Returns this rank's flags: 1 in the columns of gradients that are there. Where all are, nothing is copied from the
// host, which would wait for a GPU.
at::Tensor GradientBuckets::flags_to_send(const Spec& flags, const std::vector<double>& there) const {
  const auto options = at::TensorOptions().device(mesh_.device()).dtype(flags.dtype);
  at::Tensor out = at::zeros(flags.local_sizes, options);
  const at::Tensor columns = out.narrow(1, 0, std::ssize(there));
  if (std::ranges::count(there, 0.0) == 0) {
    columns.fill_(1);
  } else {
    columns.copy_(at::tensor(there, options.device(at::kCPU)));
  }
  return out;
}

void GradientBuckets::start(Bucket& bucket) {
  std::vector<AsyncRedistributions::Item> items;
  std::vector<double>& there = bucket.there;
  there.clear();
  const auto add = [&](const RoutePtr& route, at::Tensor piece, bool is_packed) {
    if (bucket.memory) {
      const at::Tensor part = bucket.memory->part(items.size());
      piece = is_packed ? part : part.copy_(piece);
    }
    items.push_back({.route = route, .piece = piece, .owned = bucket.memory.has_value(), .may_share = true});
  };
  for (const ArrivingGradient& each : bucket.gradients) {
    Parameter& parameter = parameters_[each.parameter];
    if (!parameter.gradient.defined() && !parameter.is_packed) {
      // No gradient came in this pass, but earlier ones may have left some.
      const at::Tensor kept = take_kept(parameter);
      if (kept.defined()) parameter.gradient = in_layout_before(parameter, kept);
    }
    const SpecPtr from = spec_before(parameter, each.pending);
    there.push_back(parameter.gradient.defined() || parameter.is_packed ? 1 : 0);
    add(route_of(each), parameter.is_packed ? at::Tensor() : piece_to_send(parameter, *from), parameter.is_packed);
    parameter.gradient = at::Tensor();
  }
  const Spec& flags = *bucket.flags.from;
  add(route(flags, bucket.flags.to), flags_to_send(flags, there), /*is_packed=*/false);
  if (bucket.memory) bucket.memory->release();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  bucket.running = std::make_shared<AsyncRedistributions>(mesh_, std::move(items));
}

std::optional<BucketMemory> GradientBuckets::memory_of(const Bucket& bucket) const {
  std::vector<std::vector<int64_t>> sizes;
  for (const ArrivingGradient& each : bucket.gradients) {
    const Parameter& parameter = parameters_[each.parameter];
    const SpecPtr from = spec_before(parameter, each.pending);
    const std::vector<PlanStep>& steps = route_of(each)->plan().steps();
    if (steps.size() != 1 || steps[0].kind != PlanStep::Kind::kAllReduce) return std::nullopt;
    sizes.push_back(from->local_sizes);
  }
  const Spec& flags = *bucket.flags.from;
  sizes.push_back(flags.local_sizes);
  return BucketMemory(std::move(sizes), at::TensorOptions().device(mesh_.device()).dtype(flags.dtype));
}

void GradientBuckets::make_plan(std::vector<ArrivalOrder> orders) {
  orders_ = std::move(orders);
  for (Parameter& each : parameters_) each.planned = nullptr;
  buckets_.clear();
  if (options_.bucket_bytes == 0) return;
  const BucketPlan plan = plan_buckets(
      agreed_order(orders_), options_.bucket_bytes, [&](const ArrivingGradient& each) { return kind_of(each); },
      [&](const ArrivingGradient& each) { return bytes_of(each); });
  for (const ArrivalOrder& gradients : plan) {
    buckets_.push_back({.gradients = gradients, .flags = flags_of(gradients), .missing = gradients.size()});
  }
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    for (const ArrivingGradient& each : buckets_[b].gradients) {
      parameters_[each.parameter].planned = &each;
      parameters_[each.parameter].bucket = b;
    }
    buckets_[b].memory = memory_of(buckets_[b]);
  }
}

void GradientBuckets::end_pass() {
  const c10::AutoGradMode no_gradient(false);
  const detail::Explicit asked_for;
  const World::Scope scope(mesh_.world(), "gradient");
  std::optional<OnFirstStream> one_stream;
  if (!mesh_.world().is_fake()) one_stream.emplace(stream_, mesh_.device());
  start_complete_buckets(/*all=*/true);
  while (next_delivery_ < buckets_.size()) deliver(buckets_[next_delivery_++]);
  // Parameters that no bucket has, and that have no gradient in this pass but some of earlier ones.
  for (const Parameter& each : parameters_) {
    if (const at::Tensor kept = take_kept(each); kept.defined()) {
      store(each, detail::meta(redistribute(kept, each.layout)).local());
    }
  }
  if (order_ == Order::kGuessed) order_ = Order::kSeen;
  forget_pass();
}

void GradientBuckets::deliver(Bucket& bucket) {
  std::vector<at::Tensor> pieces(bucket.gradients.size() + 1);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    std::atomic<bool> undelivered{true};
    bucket.running->deliver(i, pieces[i], undelivered);
  }
  bucket.running = nullptr;
  // The reduced flags are read only where this rank misses a gradient. A fake world reduces nothing: there every rank
  // is taken to have what this one has.
  const bool has_all = std::ranges::count(bucket.there, 0.0) == 0;
  const at::Tensor there = has_all || mesh_.world().is_fake() ? at::tensor(bucket.there, at::kDouble)
                                                              : pieces.back().flatten().to(at::kDouble).cpu();
  for (std::size_t i = 0; i < bucket.gradients.size(); ++i) {
    if (there.const_data_ptr<double>()[i] != 0) store(parameters_[bucket.gradients[i].parameter], pieces[i]);
  }
}

void GradientBuckets::store(const Parameter& parameter, const at::Tensor& piece) const {
  const at::Tensor tensor = tensor_of(parameter);
  if (!tensor.defined()) return;
  const at::Tensor value =
      detail::wrap(piece.to(parameter.dtype), intern_spec(mesh_, parameter.layout, parameter.sizes, parameter.dtype));
  at::Tensor& grad = tensor.mutable_grad();
  if (grad.defined()) {
    grad.add_(value);
  } else {
    grad = value;
  }
}

}  // namespace

void bucket_gradients(std::vector<BucketedParameter> parameters, const std::vector<int64_t>& data_dims,
                      const GradientBucketOptions& options) {
  std::erase_if(parameters, [](const BucketedParameter& each) { return !each.parameter.requires_grad(); });
  if (!parameters.empty() && !options.cost_model.links.empty()) {
    check_cost_model(options.cost_model, mesh_of(parameters.front().parameter).ndim(), "bucket_gradients");
  }
  if (parameters.empty() || !mesh_of(parameters.front().parameter).is_member()) return;
  const auto buckets = std::make_shared<GradientBuckets>(parameters, data_dims, options);
  for (std::size_t i = 0; i < parameters.size(); ++i) detail::set_reducer(parameters[i].parameter, buckets, i);
}

AccumulateGradients::AccumulateGradients(const DeviceMesh& mesh) : mesh_(mesh) {
  ++mesh_.world().gradient_accumulations();
}

AccumulateGradients::~AccumulateGradients() { --mesh_.world().gradient_accumulations(); }

}  // namespace tessera
