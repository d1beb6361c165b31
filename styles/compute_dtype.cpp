#include "tessera/styles/compute_dtype.h"

#include <ATen/autocast_mode.h>

namespace tessera::detail {

ComputeIn::ComputeIn(const ComputeDtype& wanted) : wanted_(wanted) {
  if (!wanted_.dtype) return;
  was_on_ = at::autocast::is_autocast_enabled(wanted_.device);
  dtype_before_ = at::autocast::get_autocast_dtype(wanted_.device);
  at::autocast::increment_nesting();
  at::autocast::set_autocast_enabled(wanted_.device, true);
  at::autocast::set_autocast_dtype(wanted_.device, *wanted_.dtype);
}

ComputeIn::~ComputeIn() {
  if (!wanted_.dtype) return;
  // The outermost one forgets the casts of parameters, which an optimizer may write next.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(wanted_.device, was_on_);
  at::autocast::set_autocast_dtype(wanted_.device, dtype_before_);
}

}  // namespace tessera::detail
