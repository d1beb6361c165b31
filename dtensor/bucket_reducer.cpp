#include "tessera/dtensor/bucket_reducer.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/core/first_stream.h"
#include "tessera/mesh/failing.h"
#include "tessera/mesh/values_on_host.h"
#include "tessera/mesh/world.h"

namespace tessera {
namespace {

constexpr const char* kOp = "gradient";

}  // namespace

BucketReducer::BucketReducer(BucketLayouts layouts, const std::vector<at::Tensor>& parameters,
                             const std::vector<int64_t>& data_dims, int64_t bucket_bytes)
    : mesh_(layouts.mesh()), bucket_bytes_(bucket_bytes), layouts_(std::move(layouts)) {
  over_data_.assign(static_cast<std::size_t>(mesh_.ndim()), kNothingPending);
  for (const int64_t dim : data_dims) {
    if (mesh_.size(dim) == 1) continue;
    over_data_[static_cast<std::size_t>(dim)] = kPendingSum;
  }
  for (const at::Tensor& each : parameters) {
    order_.push_back({.parameter = parameters_.size(), .pending = over_data_});
    parameters_.push_back({.grad = BucketedGrad(each)});
  }
  std::ranges::reverse(order_);
  follow_parameters();
  make_plan();
}

// Returns a gradient in the layout in which its bucket reduces it. This costs a collective only where the gradient is
// cut in another way than its parameter, or more is pending than the plan says.
at::Tensor BucketReducer::in_layout_before(const ArrivingGradient& planned, const at::Tensor& gradient) const {
  const Placements wanted = before_reduction(layout(planned.parameter), planned.pending);
  return placements_of(gradient) == wanted ? gradient : redistribute(gradient, wanted);
}

// Takes what AccumulateGradients has left in .grad, at the first need of a pass. If any rank may have terms of this
// parameter, a reduced .grad is a term too, since the ranks that have some made theirs one (become_term).
at::Tensor BucketReducer::take_kept(std::size_t index) {
  Parameter& parameter = parameters_[index];
  const bool is_first = !std::exchange(parameter.is_kept_taken, true);
  return has_kept_ && reduces() && is_first ? parameter.grad.take() : parameter.grad.take_unless(layout(index));
}

void BucketReducer::add_kept(std::size_t index, at::Tensor& gradient) {
  const at::Tensor kept = take_kept(index);
  if (!kept.defined()) return;
  const bool is_reduced = placements_of(kept) == layout(index);
  gradient = (is_reduced ? redistribute(kept, placements_of(gradient)) : kept) + gradient;
}

detail::GradientReducer::Outcome BucketReducer::take(std::size_t index, at::Tensor& gradient) {
  const detail::Explicit asked_for;
  const World::Scope scope(mesh_.world(), kOp);
  Parameter& parameter = parameters_[index];
  // A parameter that was frozen after its use keeps no gradient, so no rank reduces this one.
  if (!parameter.grad.parameter().requires_grad()) return Outcome::kTaken;
  if (mesh_.world().gradient_accumulations() > 0) {
    begin_adding();
    failing(mesh_.world(), kOp, [&] { gradient = parameter.grad.become_term(gradient); });
    return Outcome::kKeep;
  }
  begin_pass();
  failing(mesh_.world(), kOp, [&] { add_kept(index, gradient); });
  const std::optional<std::string> pending = pending_in(placements_of(gradient), mesh_);
  if (pending && learning_ == Learning::kWatching) note(index, *pending);
  const bool in_time = parameter.planned != nullptr && parameter.arrivals < parameter.planned->arrivals;
  if (!pending || !in_time) return Outcome::kReduceNow;
  std::optional<OnFirstStream> one_stream;
  if (!mesh_.world().is_fake()) {
    one_stream.emplace(stream_, mesh_.device());
    one_stream->keep(detail::meta(gradient).local());
  }
  failing(mesh_.world(), kOp, [&] { add_term(parameter, gradient); });
  if (parameter.arrivals == parameter.planned->arrivals) {
    --buckets_[parameter.bucket].missing;
    start_complete_buckets(/*all=*/false);
  }
  return Outcome::kTaken;
}

// Adds a gradient that has come to the parameter's sum. When the sum is complete, it moves to its bucket's memory, if
// the bucket has one. Packing at once lets the next gradient have the memory of this one, which the caches still hold.
void BucketReducer::add_term(Parameter& parameter, const at::Tensor& gradient) {
  const at::Tensor term = in_layout_before(*parameter.planned, gradient);
  parameter.gradient = parameter.gradient.defined() ? parameter.gradient + term : term;
  Bucket& bucket = buckets_[parameter.bucket];
  if (++parameter.arrivals < parameter.planned->arrivals || !bucket.memory) return;
  const auto place = static_cast<std::size_t>(parameter.planned - bucket.gradients.data());
  bucket.memory->part(place).copy_(detail::meta(parameter.gradient).local());
  parameter.gradient = at::Tensor();
  parameter.is_packed = true;
}

// Moves the parameter to the end of the order that this pass shows.
void BucketReducer::note(std::size_t index, const std::string& pending) {
  ArrivingGradient now{.parameter = index, .pending = pending};
  const auto before = std::ranges::find(seen_, index, &ArrivingGradient::parameter);
  if (before != seen_.end()) {
    now = {.parameter = index, .pending = before->pending, .arrivals = before->arrivals + 1};
    seen_.erase(before);
  }
  seen_.push_back(now);
}

// Notes that this backward only adds up, and which parameters may get terms in it: on every rank alike, although each
// rank may get other gradients.
void BucketReducer::begin_adding() {
  if (!adding_.expired()) return;
  const auto adding = std::make_shared<bool>();
  adding_ = adding;
  detail::at_end_of_backward([adding] {});
  plan_is_old_ = follow_parameters() || plan_is_old_;  // before this backward has kept terms
  has_kept_ = true;
}

// Forgets what a pass that threw has left, and sees to the end of this one.
void BucketReducer::begin_pass() {
  if (!running_.expired()) return;  // also in a backward within the one that runs, which belongs to it
  forget_pass();
  const bool changed = follow_parameters(), learned = learn_order();
  if (std::exchange(plan_is_old_, false) || changed || learned) make_plan();
  // The pass runs as long as autograd keeps the callback, also if it throws.
  const auto running = std::make_shared<bool>();
  running_ = running;
  detail::at_end_of_backward([self = shared_from_this(), running] { self->end_pass(); });
}

// Learns what calls such as module->to(dtype), set_requires_grad(false) and register_hook, which every rank makes, have
// changed. Returns whether the plan must follow.
bool BucketReducer::follow_parameters() {
  bool changed = false;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& each = parameters_[i];
    const at::Tensor tensor = each.grad.parameter();
    if (!tensor.defined()) continue;
    // Some ranks may hold terms of a parameter that was frozen or hooked since; this pass reduces them.
    const bool comes = tensor.requires_grad() && !detail::has_hooks_of_others(tensor);
    const bool is_trained = comes || (each.is_trained && has_kept_);
    if (is_trained == each.is_trained && tensor.scalar_type() == layouts_.parameter(i).dtype) continue;
    each.is_trained = is_trained;
    layouts_.set_dtype(i, tensor.scalar_type());
    changed = true;
  }
  return changed;
}

// A gradient that had nothing pending over the data dimensions in the pass that was watched, such as that of a penalty
// on the weights, may have it in the next one. It becomes a term without communication.
void BucketReducer::pend_over_data(std::string& pending) const {
  for (std::size_t i = 0; i < pending.size(); ++i) {
    if (pending[i] == kNothingPending) pending[i] = over_data_[i];
  }
}

// Compares with the other ranks what the pass before has shown, and has this pass watched if it may show more: if
// parameters take part for the first time, or have had their first gradient since. Returns whether the order has
// changed.
bool BucketReducer::learn_order() {
  const bool compares = learning_ == Learning::kSeen && bucket_bytes_ > 0;
  if (compares) {
    std::vector<ArrivalOrder> orders = orders_of_all(mesh_, seen_);
    orders.push_back(std::move(order_));
    order_ = agreed_order(orders);
    for (ArrivingGradient& each : order_) pend_over_data(each.pending);
  }
  seen_.clear();
  const auto is_new = [](const Parameter& each) { return each.is_trained && (!each.is_watched || each.is_late); };
  learning_ = std::ranges::any_of(parameters_, is_new) ? Learning::kWatching : Learning::kDone;
  return compares;
}

void BucketReducer::make_plan() {
  for (Parameter& each : parameters_) each.planned = nullptr;
  buckets_.clear();
  if (bucket_bytes_ == 0) return;
  ArrivalOrder trained = order_;
  std::erase_if(trained, [&](const ArrivingGradient& each) { return !parameters_[each.parameter].is_trained; });
  for (const ArrivalOrder& gradients : layouts_.plan(trained, bucket_bytes_)) {
    const BucketLayouts::Flags flags = layouts_.flags(gradients);
    buckets_.push_back({.gradients = gradients,
                        .flags = flags,
                        .missing = gradients.size(),
                        .memory = layouts_.memory(gradients, flags)});
  }
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    for (const ArrivingGradient& each : buckets_[b].gradients) {
      parameters_[each.parameter].planned = &each;
      parameters_[each.parameter].bucket = b;
    }
  }
}

void BucketReducer::forget_pass() {
  for (Parameter& each : parameters_) {
    each.gradient = at::Tensor();
    each.arrivals = 0;
    each.is_packed = false;
    each.is_kept_taken = false;
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
void BucketReducer::start_complete_buckets(bool all) {
  while (next_bucket_ < buckets_.size() && (all || buckets_[next_bucket_].missing == 0)) {
    if (next_bucket_ >= next_delivery_ + 2) deliver(buckets_[next_delivery_++]);
    start(buckets_[next_bucket_++]);
  }
}

void BucketReducer::start(Bucket& bucket) {
  std::vector<AsyncRedistributions::Item> items;
  failing(mesh_.world(), kOp, [&] { items = items_of(bucket); });
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  bucket.running = std::make_shared<AsyncRedistributions>(mesh_, std::move(items));
}

// Returns what the bucket sends: each gradient, and last the flags.
std::vector<AsyncRedistributions::Item> BucketReducer::items_of(Bucket& bucket) {
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
      const at::Tensor kept = take_kept(each.parameter);
      if (kept.defined()) parameter.gradient = in_layout_before(each, kept);
    }
    const SpecPtr from = layouts_.before(each);
    there.push_back(parameter.gradient.defined() || parameter.is_packed ? 1 : 0);
    add(layouts_.route(each), parameter.is_packed ? at::Tensor() : piece_to_send(parameter, *from),
        parameter.is_packed);
    parameter.gradient = at::Tensor();
  }
  const Spec& flags = *bucket.flags.from;
  add(layouts_.route(bucket.flags), flags_to_send(flags, there), /*is_packed=*/false);
  if (bucket.memory) bucket.memory->release();
  return items;
}

// Returns what the bucket sends of the parameter: zeros if it has no gradient.
at::Tensor BucketReducer::piece_to_send(const Parameter& parameter, const Spec& from) const {
  if (parameter.gradient.defined()) return detail::meta(parameter.gradient).local().to(from.dtype);
  return at::zeros(from.local_sizes, at::TensorOptions().device(mesh_.device()).dtype(from.dtype));
}

// Returns this rank's flags: 1 in the columns of gradients that are there. Where all are, nothing is copied from the
// host, which would wait for a GPU.
at::Tensor BucketReducer::flags_to_send(const Spec& flags, const std::vector<double>& there) const {
  const auto options = at::TensorOptions().device(mesh_.device()).dtype(flags.dtype);
  at::Tensor out = at::zeros(flags.local_sizes, options);
  const at::Tensor columns = out.narrow(1, 0, std::ssize(there));
  if (std::ranges::count(there, 0.0) == 0) {
    columns.fill_(1);
  } else {
    columns.copy_(at::tensor(there, at::kDouble).to(flags.dtype));
  }
  return out;
}

void BucketReducer::end_pass() {
  const c10::AutoGradMode no_gradient(false);
  const detail::Explicit asked_for;
  const World::Scope scope(mesh_.world(), kOp);
  std::optional<OnFirstStream> one_stream;
  if (!mesh_.world().is_fake()) one_stream.emplace(stream_, mesh_.device());
  start_complete_buckets(/*all=*/true);
  while (next_delivery_ < buckets_.size()) deliver(buckets_[next_delivery_++]);
  // Parameters that no bucket has, and that have no gradient in this pass but some of earlier ones.
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor kept = parameters_[i].grad.take_unless(layout(i));
    if (!kept.defined()) continue;
    const at::Tensor reduced = redistribute(kept, layout(i));
    failing(mesh_.world(), kOp, [&] { store(i, detail::meta(reduced).local()); });
  }
  has_kept_ = false;
  if (learning_ == Learning::kWatching) {
    for (Parameter& each : parameters_) {
      each.is_watched |= each.is_trained;
      each.is_placed |= each.is_late;  // if it has no gradient in this pass either, none is watched for it again
      each.is_late = false;
    }
    learning_ = Learning::kSeen;
  }
  forget_pass();
}

void BucketReducer::deliver(Bucket& bucket) {
  failing(mesh_.world(), kOp, [&] {
    std::vector<at::Tensor> pieces(bucket.gradients.size() + 1);
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      std::atomic<bool> undelivered{true};
      bucket.running->deliver(i, pieces[i], undelivered);
    }
    bucket.running = nullptr;
    store(bucket, pieces);
  });
}

// Adds the reduced gradients to .grad. Their flags are read only where this rank misses a gradient. A fake world
// reduces nothing: there every rank is taken to have what this one has.
void BucketReducer::store(const Bucket& bucket, const std::vector<at::Tensor>& pieces) {
  const bool has_all = std::ranges::count(bucket.there, 0.0) == 0;
  const at::Tensor there = has_all || mesh_.world().is_fake()
                               ? at::tensor(bucket.there, at::kDouble)
                               : values_on_host(pieces.back().flatten().to(at::kDouble), mesh_.world());
  for (std::size_t i = 0; i < bucket.gradients.size(); ++i) {
    if (there.const_data_ptr<double>()[i] == 0) continue;
    const std::size_t index = bucket.gradients[i].parameter;
    note_arrival(parameters_[index]);
    store(index, pieces[i]);
  }
}

// Notes, on every rank alike, that some rank has a gradient in this pass.
void BucketReducer::note_arrival(Parameter& parameter) const {
  if (learning_ == Learning::kWatching) {
    parameter.is_placed = true;
  } else if (!parameter.is_placed) {
    parameter.is_late = true;
  }
}

void BucketReducer::store(std::size_t index, const at::Tensor& piece) const {
  const SpecPtr spec = layouts_.after(index);
  parameters_[index].grad.add(detail::wrap(piece.to(spec->dtype), spec));
}

}  // namespace tessera
