#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/core/spec.h"

namespace tessera::detail {

// Is called for each tensor that takes part in an operator on DTensors, to_local or redistribute. Adds a hook, once per
// tensor, so that
//   - a leaf DTensor's gradient arrives in the leaf's own layout, after one redistribution: autograd first sums the
//     gradients of all uses, with their pending reductions (a Partial leaf takes a replicated gradient);
//   - a plain tensor's gradient arrives whole and plain (see whole_gradient);
//   - the gradient of a DTensor of which a view was written arrives cut as the DTensor is, or pending;
//   - that of a leaf or a plain tensor shares no memory that somebody else holds then: autograd may keep it as .grad,
//   and add to that in place.
void watch_gradient(const at::Tensor& t);

// Returns the gradient of a plain tensor that every rank has as a whole: the value of `gradient`, a DTensor; zeros on a
// rank outside its mesh. `is_held` says whether somebody else holds the memory of `gradient`; the result is a copy
// then. Autograd counts references to a tensor, not to its memory, and would take the result for one that nobody else
// has.
at::Tensor whole_gradient(const at::Tensor& gradient, bool is_held);

// For a DTensor that an operator returned: adds a hook that reduces what is pending in its gradient, once autograd has
// summed all uses, into the tensor's own layout; other mesh dimensions stay as they are, unless a view of the
// tensor was written. So an activation that several
// contracts use needs only one reduction. Returns a shared counter of the contracts that use this tensor, one for each
// call; nullptr for a tensor that no operator returned.
std::shared_ptr<const int> add_reduction_hook(const at::Tensor& t);

// For a DTensor that an operator returned: adds a hook that redistributes its gradient, once autograd has summed all
// uses, into the tensor's own layout, with Partial as Replicate. Its communication is counted under `path`.
void add_layout_hook(const at::Tensor& t, const std::string& path);

// Says whether a leaf that watch_gradient has seen has hooks of the user's own.
bool has_hooks_of_others(const at::Tensor& leaf);

// Reduces the gradients of several leaves together.
class GradientReducer {
 public:
  virtual ~GradientReducer() = default;

  enum class Outcome {
    kReduceNow,  // the gradient goes on as if there were no reducer
    kKeep,       // autograd adds it to the leaf's .grad as it is, with what is pending
    kTaken,      // the reducer will add it to the leaf's .grad before the backward pass ends
  };
  // Is called with the gradient of leaf `index` in each backward pass, which may be changed. Every rank that has a
  // gradient of the leaf calls it.
  virtual Outcome take(std::size_t index, at::Tensor& gradient) = 0;
  // Returns the layout that the gradient of leaf `index` has in the end.
  virtual const Placements& layout(std::size_t index) const = 0;
};
// Gives the gradients of `leaf`, a DTensor that requires grad, to `reducer` under this index. A gradient that is not
// added to .grad (torch::autograd::grad), one that has a graph of its own (create_graph), and that of a leaf with hooks
// of the user's own goes on without it.
void set_reducer(const at::Tensor& leaf, const std::shared_ptr<GradientReducer>& reducer, std::size_t index);

// While it lives, a backward pass that starts on this thread is a part of the pass that runs on it now. The pass must
// call finish() unless it throws.
class NestedBackward {
 public:
  NestedBackward();
  ~NestedBackward();
  NestedBackward(const NestedBackward&) = delete;
  NestedBackward& operator=(const NestedBackward&) = delete;
  void finish();

 private:
  friend void at_end_of_backward(std::function<void()> callback);

  NestedBackward* const outer_;
  std::vector<std::function<void()>> callbacks_;  // for the end of the outer pass
};
// Calls `callback` when the backward pass that runs on this thread, with the passes nested in it, has computed all
// gradients. Autograd destroys it unused where the pass throws.
void at_end_of_backward(std::function<void()> callback);

}  // namespace tessera::detail
