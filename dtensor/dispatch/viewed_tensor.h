#pragma once

#include <cstddef>
#include <cstdint>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dispatch/call.h"
#include "tessera/dtensor/dispatch/decision.h"

namespace tessera::dispatch {

// Follows the first tensor of a call of a view operator, and makes the results views of it. A view of redistributed
// pieces is a copy (detail::ViewCopy), and so is a view of a copy. Does nothing for a plain tensor.
class ViewedTensor {
 public:
  ViewedTensor(const Call& call, const Decision& decision);

  // In every mode a view of an inference tensor is one.
  bool is_inference() const { return inference_; }
  // Makes the tensor's piece one that can be moved.
  void prepare(at::Tensor& piece) const;
  // Takes the piece when it has been moved, and makes it one that the operator can view.
  void take(at::Tensor& piece);
  // Returns `local`, or the viewed piece where the view of it is all of it: a dimension of size 1 may have got another
  // stride, by which LibTorch would take both for tensors that overlap in part.
  at::Tensor piece_of(const at::Tensor& local, const Spec& spec) const;
  // Makes `out`, result `output` with this piece, a view, or records that it is a copy.
  void make_view(const at::Tensor& out, const at::Tensor& piece, std::size_t output);

 private:
  void find_copy(const detail::Meta& meta);
  bool conjugates() const;
  bool may_copy() const;
  bool can_bring_back(const detail::Meta& meta) const;
  detail::ViewCopy copy_of_viewed() const;
  void forget_viewed();
  bool lies_apart(const at::Tensor& piece) const;

  const Call& call_;  // whose tensors may be gone once the operator runs
  const Decision& decision_;
  const bool inference_;
  const bool is_dtensor_;
  SpecPtr spec_;                    // the tensor's
  at::Tensor piece_;                // before it is moved
  int64_t bytes_before_ = 0;        // in the tensor's memory
  detail::WriteCounters counters_;  // the tensor's
  detail::WriteCounters original_;  // of what the tensor copied, if it is a copy; else the same
  detail::ViewCopy copy_;           // what the results record; made_by is nullptr unless they are copies
};

}  // namespace tessera::dispatch
