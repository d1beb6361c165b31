#include "tessera/ops/kernels/held_elements.h"

#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>

namespace tessera::detail {
namespace {

// An operator or two for each interval take less time than a search in them up to about this number.
constexpr std::size_t kFewIntervals = 8;

// Holds one number for each interval.
struct Bounds {
  std::vector<int64_t> begins;
  std::vector<int64_t> ends;
  std::vector<int64_t> places;  // of the first elements
  std::vector<int64_t> shifts;  // from places to elements
};

Bounds bounds_of(const Intervals& held) {
  Bounds out;
  int64_t place = 0;
  for (const Interval& each : held) {
    out.begins.push_back(each.begin);
    out.ends.push_back(each.end);
    out.places.push_back(place);
    out.shifts.push_back(each.begin - place);
    place += each.size();
  }
  return out;
}

// Returns them as a tensor of the type and the device of `t`.
at::Tensor beside(const at::Tensor& t, const std::vector<int64_t>& numbers) {
  return at::tensor(numbers).to(t.options(), /*non_blocking=*/true);
}

// Returns, for each of `values`, the last of the ascending `firsts` that is not greater; -1 where all are.
at::Tensor last_not_greater(const at::Tensor& values, const std::vector<int64_t>& firsts) {
  return at::bucketize(values, beside(values, firsts), /*out_int32=*/false, /*right=*/true) - 1;
}

}  // namespace

at::Tensor places_of(const at::Tensor& elements, const Intervals& held, int64_t elsewhere) {
  const Bounds bounds = bounds_of(held);
  if (held.size() > kFewIntervals) {
    const at::Tensor last = last_not_greater(elements, bounds.begins);
    const at::Tensor known = last.clamp_min(0);
    const at::Tensor here = at::logical_and(last >= 0, elements < beside(elements, bounds.ends).take(known));
    return (elements - beside(elements, bounds.shifts).take(known)).masked_fill_(here.logical_not(), elsewhere);
  }
  at::Tensor out = at::full_like(elements, elsewhere);
  for (std::size_t i = 0; i < held.size(); ++i) {
    const at::Tensor here = at::logical_and(elements >= held[i].begin, elements < held[i].end);
    out = at::where(here, elements - bounds.shifts[i], out);
  }
  return out;
}

at::Tensor elements_at(const at::Tensor& places, const Intervals& held) {
  const Bounds bounds = bounds_of(held);
  if (held.size() > kFewIntervals) {
    return places + beside(places, bounds.shifts).take(last_not_greater(places, bounds.places));
  }
  at::Tensor out = places + bounds.shifts.front();
  for (std::size_t i = 1; i < held.size(); ++i) {
    out = at::where(places >= bounds.places[i], places + bounds.shifts[i], out);
  }
  return out;
}

}  // namespace tessera::detail
