#include "tessera/placement/planner/byte_bounds.h"

#include <algorithm>

namespace tessera {

double least_received(const Ends& ends) {
  double out = 0;
  if (ends.terms == 1) {
    out = ends.elements * ends.copies - ends.reachable;
  } else if (ends.pieces_per_element == 1) {
    out = ends.elements * (ends.terms + ends.copies - 1) - std::min(ends.held, ends.elements);
  } else {
    out = ends.elements * ends.terms - (ends.new_copies ? 0 : ends.held / ends.copies);
  }
  return std::max(out, 0.0);
}

double least_received_by_steps(const Ends& ends) {
  const double any = least_received(ends);
  if (ends.terms == 1) return any;
  // A reduction is over at least two ranks.
  const double reduced = std::max(ends.reduced, 2.0);
  const double reducing = ends.copies == 1 ? ends.terms - ends.terms / reduced : ends.terms + ends.copies - 2;
  double out = ends.elements * reducing;
  if (ends.reduced == 1) out = std::min(out, ends.elements * ends.terms * ends.copies - ends.reachable);
  return std::max(any, out);
}

}  // namespace tessera
