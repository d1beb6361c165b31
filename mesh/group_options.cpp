#include "tessera/mesh/group_options.h"

#include <algorithm>

namespace tessera {

GroupOptions shared_group_options(const std::vector<GroupOptions>& of_dims) {
  const GroupOptions& first = of_dims.front();
  const bool shared =
      std::all_of(of_dims.begin(), of_dims.end(), [&](const GroupOptions& each) { return each == first; });
  return shared ? first : GroupOptions{};
}

}  // namespace tessera
