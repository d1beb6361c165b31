#include "tessera/inspect/clock_offset.h"

#include <algorithm>
#include <cstddef>
#include <limits>

namespace tessera {

int64_t clock_offset(const std::vector<BarrierTimes>& first, const std::vector<BarrierTimes>& other) {
  int64_t least = std::numeric_limits<int64_t>::min(), most = std::numeric_limits<int64_t>::max();
  for (std::size_t i = 0; i < std::min(first.size(), other.size()); ++i) {
    least = std::max(least, other[i].enter_ns - first[i].exit_ns);
    most = std::min(most, other[i].exit_ns - first[i].enter_ns);
  }
  if (least > most) return least / 2 + most / 2;
  return std::clamp<int64_t>(0, least, most);
}

}  // namespace tessera
