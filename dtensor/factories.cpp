#include "tessera/dtensor/factories.h"

#include <algorithm>
#include <array>
#include <stdexcept>

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DefaultDtype.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/core/spec.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/deferred/deferred.h"
#include "tessera/dtensor/random/draws.h"
#include "tessera/ops/rules/integer_range.h"

namespace tessera {
namespace {

at::ScalarType default_dtype() { return c10::typeMetaToScalarType(c10::get_default_dtype()); }

// Returns a DTensor whose piece `fill` makes, given the Spec and the tensor options.
template <class Fill>
at::Tensor make(const char* who, at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& given,
                at::ScalarType dtype, const Fill& fill) {
  if (std::any_of(sizes.begin(), sizes.end(), [](int64_t size) { return size < 0; })) {
    throw std::invalid_argument(fmt::format("{}: the global shape [{}] has a negative size; give sizes of 0 or more",
                                            who, fmt::join(sizes, ", ")));
  }
  const Placements placements = normalize(given, mesh.mesh(), static_cast<int64_t>(sizes.size()), who);
  if (any_partial(placements)) {
    throw std::invalid_argument(fmt::format(
        "{}: {} has a pending reduction, whose terms could be filled in many ways; make it Replicate and redistribute",
        who, to_string(placements)));
  }
  check_layout(placements, mesh.mesh(), sizes, who);
  const SpecPtr spec = intern_spec(mesh, placements, sizes, dtype);
  const detail::NotDeferred own_tensors;
  return detail::wrap(fill(*spec, at::TensorOptions(dtype).device(mesh.device())), spec);
}

// Is called before a draw is numbered, so that what cannot be drawn changes nothing.
at::ScalarType checked_floating(const char* who, at::ScalarType dtype) {
  constexpr std::array kDrawn = {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};
  if (std::ranges::find(kDrawn, c10::toRealValueType(dtype)) != kDrawn.end()) return dtype;
  throw std::invalid_argument(
      fmt::format("{}: {} cannot be drawn; give Half, BFloat16, Float or Double, or their complex dtypes, or call "
                  "randint for whole "
                  "numbers",
                  who, c10::toString(dtype)));
}

}  // namespace

at::Tensor empty(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
                 std::optional<at::ScalarType> dtype) {
  return make("empty", sizes, mesh, placements, dtype.value_or(default_dtype()),
              [](const Spec& spec, const at::TensorOptions& options) { return at::empty(spec.local_sizes, options); });
}

at::Tensor zeros(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
                 std::optional<at::ScalarType> dtype) {
  return make("zeros", sizes, mesh, placements, dtype.value_or(default_dtype()),
              [](const Spec& spec, const at::TensorOptions& options) { return at::zeros(spec.local_sizes, options); });
}

at::Tensor ones(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
                std::optional<at::ScalarType> dtype) {
  return make("ones", sizes, mesh, placements, dtype.value_or(default_dtype()),
              [](const Spec& spec, const at::TensorOptions& options) { return at::ones(spec.local_sizes, options); });
}

at::Tensor full(at::IntArrayRef sizes, const at::Scalar& value, const DeviceMesh& mesh, const Placements& placements,
                std::optional<at::ScalarType> dtype) {
  const at::ScalarType of_value = value.isFloatingPoint() ? default_dtype() : value.type();
  return make(
      "full", sizes, mesh, placements, dtype.value_or(of_value),
      [&](const Spec& spec, const at::TensorOptions& options) { return at::full(spec.local_sizes, value, options); });
}

at::Tensor arange(int64_t size, const DeviceMesh& mesh, const Placements& placements,
                  std::optional<at::ScalarType> dtype) {
  return make("arange", {size}, mesh, placements, dtype.value_or(at::kLong),
              [](const Spec& spec, const at::TensorOptions& options) {
                // LibTorch's range of short floats rounds sums that depend on where it begins.
                const at::TensorOptions exact = at::isFloatingType(spec.dtype) ? options.dtype(at::kLong) : options;
                std::vector<at::Tensor> ranges = {at::arange(0, 0, exact)};  // throws what a rank with elements throws
                if (spec.mesh.is_member()) {
                  for (const Interval& part : spec.tile[0]) ranges.push_back(at::arange(part.begin, part.end, exact));
                }
                return at::cat(ranges).to(spec.dtype);
              });
}

at::Tensor rand(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
                std::optional<at::ScalarType> dtype) {
  return make("rand", sizes, mesh, placements, checked_floating("rand", dtype.value_or(default_dtype())),
              [](const Spec& spec, const at::TensorOptions& options) {
                at::Tensor out = at::empty(spec.local_sizes, options);
                detail::draw_uniform(out, spec, detail::next_draw(spec.mesh.world()), 0, 1);
                return out;
              });
}

at::Tensor randn(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements,
                 std::optional<at::ScalarType> dtype) {
  return make("randn", sizes, mesh, placements, checked_floating("randn", dtype.value_or(default_dtype())),
              [](const Spec& spec, const at::TensorOptions& options) {
                at::Tensor out = at::empty(spec.local_sizes, options);
                detail::draw_normal(out, spec, detail::next_draw(spec.mesh.world()), 0, 1);
                return out;
              });
}

at::Tensor randint(int64_t low, int64_t high, at::IntArrayRef sizes, const DeviceMesh& mesh,
                   const Placements& placements, std::optional<at::ScalarType> dtype) {
  const at::ScalarType type = dtype.value_or(at::kLong);
  const rules::IntegerRange range = rules::integer_range("randint", low, high, type);
  return make("randint", sizes, mesh, placements, type, [&](const Spec& spec, const at::TensorOptions& options) {
    at::Tensor out = at::empty(spec.local_sizes, options);
    detail::draw_integers(out, spec, detail::next_draw(spec.mesh.world()), range.first, range.count);
    return out;
  });
}

}  // namespace tessera
