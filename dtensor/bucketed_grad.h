#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include "tessera/placement/placement.h"

namespace tessera {

// Reads and writes the .grad of a parameter whose gradients buckets reduce: it is reduced, or, after a backward under
// AccumulateGradients, a term of this rank's with reductions pending. Does not keep the parameter alive, and does
// nothing to one that is gone.
class BucketedGrad {
 public:
  explicit BucketedGrad(const at::Tensor& parameter) : impl_(parameter.getIntrusivePtr()) {}

  // Returns the parameter, or an undefined tensor if it is gone.
  at::Tensor parameter() const { return at::Tensor(impl_.lock()); }

  // Lets autograd add `gradient`, which it returns laid out as .grad then is: a mesh dimension on which one of the two
  // has terms has terms of both, so that what is reduced becomes a term. Communicates only where both are cut, in
  // different ways, or where one has terms on a mesh dimension that cuts the other together with another one.
  at::Tensor become_term(const at::Tensor& gradient) const;
  // Takes .grad away and returns it; an undefined tensor if there is none that is a DTensor.
  at::Tensor take() const;
  // Does the same, but leaves a .grad that has this layout, and so is reduced.
  at::Tensor take_unless(const Placements& layout) const;
  // Adds a reduced value.
  void add(const at::Tensor& value) const;

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl> impl_;
};

}  // namespace tessera
