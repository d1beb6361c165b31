#include "tessera/dtensor/bucket_layouts.h"

#include <iterator>
#include <utility>

#include <ATen/ceil_div.h>
#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include "tessera/dtensor/arriving_gradients.h"
#include "tessera/placement/plan.h"

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

}  // namespace

BucketLayouts::BucketLayouts(DeviceMesh mesh, std::vector<Parameter> parameters, std::optional<at::ScalarType> dtype,
                             CostModel model)
    : mesh_(std::move(mesh)), parameters_(std::move(parameters)), dtype_(dtype), model_(std::move(model)) {}

at::ScalarType BucketLayouts::sent_dtype(const Parameter& parameter) const {
  return c10::isComplexType(parameter.dtype) ? parameter.dtype : dtype_.value_or(parameter.dtype);
}

SpecPtr BucketLayouts::before(const ArrivingGradient& gradient) const {
  const Parameter& parameter = parameters_[gradient.parameter];
  return intern_spec(mesh_, before_reduction(parameter.layout, gradient.pending), parameter.sizes,
                     sent_dtype(parameter));
}

SpecPtr BucketLayouts::after(std::size_t index) const {
  const Parameter& parameter = parameters_[index];
  return intern_spec(mesh_, parameter.layout, parameter.sizes, parameter.dtype);
}

RoutePtr BucketLayouts::route(const ArrivingGradient& gradient) const {
  return bucket_route(*before(gradient), parameters_[gradient.parameter].layout, model_);
}

RoutePtr BucketLayouts::route(const Flags& flags) const { return bucket_route(*flags.from, flags.to, model_); }

std::string BucketLayouts::kind_of(const ArrivingGradient& gradient) const {
  const RoutePtr by = route(gradient);
  if (!by->communicates()) return "";
  return fmt::format("{} {}{}", c10::toString(sent_dtype(parameters_[gradient.parameter])), gradient.pending,
                     collectives_of(by->plan()));
}

int64_t BucketLayouts::bytes_of(const ArrivingGradient& gradient) const {
  const SpecPtr spec = before(gradient);
  return bytes_of_even_piece(*spec, spec->placements);
}

BucketPlan BucketLayouts::plan(const ArrivalOrder& order, int64_t bucket_bytes) const {
  return plan_buckets(
      order, bucket_bytes, [&](const ArrivingGradient& each) { return kind_of(each); },
      [&](const ArrivingGradient& each) { return bytes_of(each); });
}

BucketLayouts::Flags BucketLayouts::flags(const ArrivalOrder& bucket) const {
  const ArrivingGradient& first = bucket.front();
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
  const auto with_columns = [&](int64_t columns) {
    return Flags{.from = intern_spec(mesh_, from, {sections, columns}, sent_dtype(parameter)), .to = to};
  };
  const int64_t count = std::ssize(bucket);
  Flags out = with_columns(count);
  // A plan that scatters columns over mesh dimensions must find as many for each rank.
  const std::string wanted = collectives_of(route(first)->plan());
  if (collectives_of(route(out)->plan()) == wanted) return out;
  return with_columns(at::ceil_div(count, mesh_.size()) * mesh_.size());
}

std::optional<BucketMemory> BucketLayouts::memory(const ArrivalOrder& bucket, const Flags& flags) const {
  std::vector<std::vector<int64_t>> sizes;
  for (const ArrivingGradient& each : bucket) {
    const RoutePtr by = route(each);
    const std::vector<PlanStep>& steps = by->plan().steps();
    if (steps.size() != 1 || steps[0].kind != PlanStep::Kind::kAllReduce) return std::nullopt;
    sizes.push_back(before(each)->local_sizes);
  }
  sizes.push_back(flags.from->local_sizes);
  return BucketMemory(std::move(sizes), at::TensorOptions().device(mesh_.device()).dtype(flags.from->dtype));
}

}  // namespace tessera
