// This file has the local kernels of operators that read or write elements by their indices, where an indexed dimension
// is cut. Every rank has all indices, and uses those that name elements of its piece.

#include <algorithm>
#include <cstdint>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include "tessera/dtensor/core/tensor_lists.h"
#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/ops/kernels/arguments.h"
#include "tessera/ops/kernels/masked_rows.h"

namespace tessera {
namespace {

using torch::jit::Stack;

// Describes the indices of a call, and which of its dimensions are cut.
class Indexed {
 public:
  Indexed(const LocalCall& call, Stack& stack) : call_(call), stack_(stack) {
    if (const int list = argument(call.op, "indices"); list >= 0) {
      detail::each_tensor(arg("indices"), [&](const at::Tensor& t, std::size_t) { indices_.push_back(t); });
      several_ = true;
    } else {
      const int64_t dim = arg("dim").toInt(), ndim = self().ndim();
      indices_.resize(static_cast<std::size_t>(ndim));
      indices_[static_cast<std::size_t>(dim < 0 ? dim + ndim : dim)] = arg("index").toTensor();
    }
    for (std::size_t d = 0; d < indices_.size(); ++d) {
      if (indices_[d].defined() && !is_whole(d)) cut_.push_back(d);
    }
  }

  const std::vector<std::size_t>& cut() const { return cut_; }
  // Says whether this rank has none of the elements that an index may name.
  bool has_nothing() const {
    return std::ranges::any_of(cut_, [&](std::size_t d) { return self().local_sizes[d] == 0; });
  }

  at::IValue& arg(const char* name) { return stack_[static_cast<std::size_t>(argument(call_.op, name))]; }
  // Returns what is added.
  at::IValue& source() {
    for (const char* name : {"src", "source"}) {
      if (argument(call_.op, name) >= 0) return arg(name);
    }
    return arg("values");
  }

  // Replaces each index of a dimension that is cut by its place in the piece; in the dimension d it is elsewhere(d)
  // where another rank has it. Returns a mask of the elements that are here, which broadcasts to those that are read or
  // written.
  template <class Elsewhere>
  at::Tensor place(const Elsewhere& elsewhere) {
    at::Tensor here;
    for (const std::size_t d : cut_) {
      const at::Tensor index = from_front(d);
      const at::Tensor places = detail::rows_here(index, self().tile[d], -1);
      const at::Tensor inside = places >= 0;
      indices_[d] = places.masked_fill(inside.logical_not(), elsewhere(d));
      here = here.defined() ? here.logical_and(inside) : inside;
    }
    give_back();
    return here.view(shape_among_elements(here));
  }

 private:
  const Spec& self() const { return *call_.inputs[0]; }
  bool is_whole(std::size_t d) const { return self().local_sizes[d] == self().sizes[d]; }

  // Returns the index with each element counted from the front; only those of a list may be negative.
  at::Tensor from_front(std::size_t d) const {
    const at::Tensor& index = indices_[d];
    const int64_t size = self().sizes[d];
    detail::check_indices(index, {several_ ? -size : 0, size}, call_.op.schema().name().c_str(),
                          fmt::format("dimension {}", d).c_str());
    return several_ ? at::where(index < 0, index + size, index) : index;
  }

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
  bool several_ = false;
  std::vector<at::Tensor> indices_;  // of each dimension; undefined where there is none
  std::vector<std::size_t> cut_;
};

// Reads with zeros for the elements that other ranks have.
void elements(const LocalCall& call, Stack& stack) {
  Indexed indexed(call, stack);
  if (indexed.cut().empty()) return call.op.callBoxed(stack);
  const at::Tensor here = indexed.place([](std::size_t) { return 0; });
  if (indexed.has_nothing()) {
    stack = {at::zeros(call.outputs[0]->local_sizes, stack[0].toTensor().options())};
  } else {
    call.op.callBoxed(stack);
    stack[0].toTensor().masked_fill_(here.logical_not(), 0);
  }
}

// Leaves the piece as it is, as the result of an operator that writes nothing here.
void keep_piece(const LocalCall& call, Stack& stack) {
  const at::Tensor piece = stack[0].toTensor();
  stack = {writes(call.op) ? piece : piece.clone()};
}

// Adds zeros to the first element of a line for those that other ranks have.
void elements_added(const LocalCall& call, Stack& stack) {
  Indexed indexed(call, stack);
  if (indexed.cut().empty()) return call.op.callBoxed(stack);
  const at::Tensor here = indexed.place([](std::size_t) { return 0; });
  if (indexed.has_nothing()) return keep_piece(call, stack);
  at::IValue& source = indexed.source();
  at::Tensor added = source.toTensor();
  if (argument(call.op, "src") >= 0) {  // which may be larger than its index
    for (int64_t d = 0; d < added.dim(); ++d) added = added.narrow(d, 0, here.size(d));
  }
  source = added.masked_fill(here.logical_not(), 0);
  call.op.callBoxed(stack);
}

// Writes to a copy of the piece that has one more element at the end of each line, for those that other ranks have.
void elements_written(const LocalCall& call, Stack& stack) {
  Indexed indexed(call, stack);
  if (indexed.cut().empty()) return call.op.callBoxed(stack);
  const std::vector<int64_t>& sizes = call.inputs[0]->local_sizes;
  indexed.place([&](std::size_t d) { return sizes[d]; });
  if (indexed.has_nothing()) return keep_piece(call, stack);
  const at::Tensor piece = stack[0].toTensor();
  std::vector<int64_t> more(2 * sizes.size(), 0);  // from the last dimension on, before and after
  for (const std::size_t d : indexed.cut()) more[2 * (sizes.size() - d) - 1] = 1;
  stack[0] = at::constant_pad_nd(piece, more, 0);
  call.op.callBoxed(stack);
  at::Tensor written = stack[0].toTensor();
  for (const std::size_t d : indexed.cut()) written = written.narrow(static_cast<int64_t>(d), 0, sizes[d]);
  stack = {writes(call.op) ? piece.copy_(written) : written.contiguous()};
}

[[maybe_unused]] const bool kRegistered =
    register_local_kernel("elements", elements, {.rearranges = true}) &&
    register_local_kernel("elements_added", elements_added, {.rearranges = true}) &&
    register_local_kernel("elements_written", elements_written, {.rearranges = true});

}  // namespace
}  // namespace tessera
