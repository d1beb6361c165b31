// This file has the local kernels of operators that read or write elements by their indices, where an indexed dimension
// is cut. A rank has all indices, but for those that another mesh dimension cuts, and uses those that name elements of
// its piece.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <fmt/format.h>

#include "tessera/dtensor/core/tensor_lists.h"
#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/mesh/core/device_checks.h"
#include "tessera/ops/kernels/arguments.h"
#include "tessera/ops/kernels/held_elements.h"
#include "tessera/ops/kernels/masked_rows.h"

namespace tessera {
namespace {

using torch::jit::Stack;

// Describes the indices of a call, and which of the dimensions that they index are cut.
class Indexed {
 public:
  Indexed(const LocalCall& call, Stack& stack) : call_(call), stack_(stack) {
    if (argument(call.op, "indices") >= 0) {
      detail::each_tensor(arg("indices"), [&](const at::Tensor& t, std::size_t) { indices_.push_back(t); });
      several_ = from_end_ = true;
    } else {
      from_end_ = call.op.schema().name().find("index_fill") != std::string::npos;
      const int64_t dim = arg("dim").toInt(), ndim = self().ndim();
      indices_.resize(static_cast<std::size_t>(ndim));
      indices_[static_cast<std::size_t>(dim < 0 ? dim + ndim : dim)] = arg("index").toTensor();
    }
    for (std::size_t d = 0; d < indices_.size(); ++d) {
      if (indices_[d].defined() && size_here(d) != self().sizes[d]) cut_.push_back(d);
    }
  }

  // Throws std::out_of_range for an index outside its dimension.
  void check() const {
    const bool reads = argument(call_.op, "values") < 0;
    if (reads && call_.outputs[0]->numel() == 0) return;  // LibTorch looks at no index
    for (std::size_t d = 0; d < indices_.size(); ++d) {
      if (!indices_[d].defined()) continue;
      const int64_t size = self().sizes[d];
      detail::check_indices(indices_[d], {from_end_ ? -size : 0, size}, call_.op.schema().name().c_str(),
                            fmt::format("dimension {}", d).c_str());
    }
  }
  // Says whether all ranks have the same indices.
  bool are_same_everywhere() const {
    const auto first = call_.inputs.begin() + 1;  // self is before them
    const auto last = first + (several_ ? static_cast<std::ptrdiff_t>(indices_.size()) : 1);
    return std::all_of(first, last,
                       [](const SpecPtr& spec) { return spec == nullptr || !(spec->sharded || spec->partial); });
  }

  const std::vector<std::size_t>& cut() const { return cut_; }
  int64_t size_here(std::size_t d) const { return self().local_sizes[d]; }
  // Says whether this rank has none of the elements that an index may name.
  bool has_nothing() const {
    return std::ranges::any_of(cut_, [&](std::size_t d) { return size_here(d) == 0; });
  }

  at::IValue& arg(const char* name) { return stack_[static_cast<std::size_t>(argument(call_.op, name))]; }
  // Returns what is added.
  at::IValue& source() {
    for (const char* name : {"src", "source"}) {
      if (argument(call_.op, name) >= 0) return arg(name);
    }
    return arg("values");
  }

  // Replaces each index of a dimension d that is cut by make(d, index, places). `index` counts from the front, and
  // `places` are those in the piece, or -1 for elements of other ranks. Returns a mask of the elements that are here,
  // which broadcasts to those that are read or written. All are on the piece's device.
  template <class Make>
  at::Tensor replace(const Make& make) {
    at::Tensor here;
    for (const std::size_t d : cut_) {
      const at::Tensor given = indices_[d].to(stack_[0].toTensor().device());
      const at::Tensor index = from_end_ ? at::where(given < 0, given + self().sizes[d], given) : given;
      const at::Tensor places = detail::places_of(index, self().tile[d], -1);
      const at::Tensor inside = places >= 0;
      here = here.defined() ? here.logical_and(inside) : inside;
      indices_[d] = make(d, index, places);
    }
    give_back();
    return here.view(shape_among_elements(here));
  }

 private:
  const Spec& self() const { return *call_.inputs[0]; }

  void give_back() {
    if (!several_) {
      arg("index") = indices_[cut_.front()];
    } else {
      detail::replace_tensors(arg("indices"), [&](const at::Tensor&, std::size_t i) { return indices_[i]; });
    }
  }

  // Returns the mask's sizes with ones for the dimensions of the elements that follow those of the indices.
  std::vector<int64_t> shape_among_elements(const at::Tensor& here) const {
    std::vector<int64_t> sizes = here.sizes().vec();
    const auto ndim = static_cast<std::size_t>(self().ndim());
    if (!several_) {
      if (sizes.size() < ndim) sizes.resize(ndim - cut_.front(), 1);  // one index for all lines
      return sizes;
    }
    std::size_t first = indices_.size(), last = 0, count = 0;
    for (std::size_t d = 0; d < indices_.size(); ++d) {
      if (!indices_[d].defined()) continue;
      first = std::min(first, d);
      last = d;
      ++count;
    }
    const bool together = last - first + 1 == count;  // else the indices' dimensions come first
    sizes.resize(sizes.size() + ndim - count - (together ? first : 0), 1);
    return sizes;
  }

  const LocalCall& call_;
  Stack& stack_;
  bool several_ = false;             // a list of indices
  bool from_end_ = false;            // indices may be negative
  std::vector<at::Tensor> indices_;  // of each dimension; undefined where there is none
  std::vector<std::size_t> cut_;
};

// Ranks that have the same indices refuse them alike, and the job goes on.
void check_elements(const LocalCall& call, Stack& stack) {
  const Indexed indexed(call, stack);
  if (indexed.are_same_everywhere()) return indexed.check();
  call.inputs[0]->mesh.world().guard(call.op.schema().name(), [&] { indexed.check(); });
}

// Returns the number that changes nothing where it is added: 0.0 would take the sign of -0.0.
at::Scalar neutral_of_sum(at::ScalarType type) {
  if (c10::isComplexType(type)) return c10::complex<double>(-0.0, -0.0);
  return c10::isFloatingType(type) ? at::Scalar(-0.0) : at::Scalar(0);
}

// Reads terms: zeros stand for the elements that other ranks have.
void elements(const LocalCall& call, Stack& stack) {
  Indexed indexed(call, stack);
  if (indexed.cut().empty()) return call.op.callBoxed(stack);
  const at::Tensor piece = stack[0].toTensor();
  const at::Scalar zero = neutral_of_sum(piece.scalar_type());
  if (indexed.has_nothing()) {
    stack = {at::full(call.outputs[0]->local_sizes, zero, piece.options())};
    return;
  }
  const auto first_for_others = [](std::size_t, const at::Tensor&, const at::Tensor& places) {
    return places.clamp_min(0);
  };
  const at::Tensor here = indexed.replace(first_for_others);
  call.op.callBoxed(stack);
  stack[0].toTensor().masked_fill_(here.logical_not(), zero);
}

// Leaves the piece as it is, as the result of an operator that writes nothing here.
void keep_piece(const LocalCall& call, Stack& stack) {
  const at::Tensor piece = stack[0].toTensor();
  stack = {writes(call.op) ? piece : piece.clone()};
}

bool is_finite(const at::Scalar& number) {
  if (!number.isComplex()) return std::isfinite(number.toDouble());
  const c10::complex<double> value = number.toComplexDouble();
  return std::isfinite(value.real()) && std::isfinite(value.imag());
}

// Applies the factor of what is added, if it would make other numbers of zeros.
void scale_source(const LocalCall& call, Indexed& indexed) {
  if (argument(call.op, "alpha") < 0 || is_finite(indexed.arg("alpha").toScalar())) return;
  indexed.source() = indexed.source().toTensor() * indexed.arg("alpha").toScalar();
  indexed.arg("alpha") = 1;
}

// Adds zeros for the elements that other ranks have, all over the piece: a GPU adds to one place in turn.
void elements_added(const LocalCall& call, Stack& stack) {
  Indexed indexed(call, stack);
  if (indexed.cut().empty()) return call.op.callBoxed(stack);
  if (indexed.has_nothing()) return keep_piece(call, stack);
  const auto any_for_others = [&](std::size_t d, const at::Tensor& index, const at::Tensor& places) {
    return at::where(places >= 0, places, index.remainder(indexed.size_here(d)));
  };
  const at::Tensor here = indexed.replace(any_for_others);
  if (here.numel() == 0) return keep_piece(call, stack);
  scale_source(call, indexed);
  at::Tensor added = indexed.source().toTensor().to(here.device());
  if (argument(call.op, "src") >= 0) {  // which may be larger than its index
    for (int64_t d = 0; d < added.dim(); ++d) added = added.narrow(d, 0, here.size(d));
  }
  indexed.source() = added.masked_fill(here.logical_not(), neutral_of_sum(added.scalar_type()));
  call.op.callBoxed(stack);
}

// Returns an interval of the piece's dimension that has all `places` in the piece: a small one if the host knows them.
Interval written_interval(const at::Tensor& places, int64_t size) {
  if (is_queued(places)) return {0, size};
  const int64_t last = places.numel() == 0 ? -1 : places.max().item<int64_t>();
  if (last < 0) return {};
  return {places.masked_fill(places < 0, last).min().item<int64_t>(), last + 1};
}

// Writes to a copy of what is written, which has one more element at the end of each line, for those that other ranks
// have.
void elements_written(const LocalCall& call, Stack& stack) {
  Indexed indexed(call, stack);
  if (indexed.cut().empty()) return call.op.callBoxed(stack);
  if (indexed.has_nothing()) return keep_piece(call, stack);
  const at::Tensor piece = stack[0].toTensor();
  at::Tensor result = writes(call.op) ? piece : piece.clone();
  at::Tensor part = result;
  std::vector<int64_t> more(2 * static_cast<std::size_t>(piece.dim()), 0);  // from the last dimension, before and after
  const auto behind_for_others = [&](std::size_t d, const at::Tensor&, const at::Tensor& places) {
    const Interval interval = written_interval(places, indexed.size_here(d));
    part = part.narrow(static_cast<int64_t>(d), interval.begin, interval.size());
    more[more.size() - 2 * d - 1] = 1;
    return at::where(places >= 0, places - interval.begin, interval.size());
  };
  indexed.replace(behind_for_others);
  if (part.numel() > 0) {
    stack[0] = at::constant_pad_nd(part, more, 0);
    call.op.callBoxed(stack);
    at::Tensor written = stack[0].toTensor();
    for (const std::size_t d : indexed.cut()) written = written.narrow(static_cast<int64_t>(d), 0, part.size(d));
    part.copy_(written);
  }
  stack = {result};
}

constexpr LocalKernelTraits kTraits = {.rearranges = true, .check = check_elements};

[[maybe_unused]] const bool kRegistered = register_local_kernel("elements", elements, kTraits) &&
                                          register_local_kernel("elements_added", elements_added, kTraits) &&
                                          register_local_kernel("elements_written", elements_written, kTraits);

}  // namespace
}  // namespace tessera
