#include "tessera/examples/train/layouts.h"

#include <algorithm>
#include <string>

#include <fmt/format.h>
#include <torch/nn/module.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/inspect/visualize.h"

namespace train {

std::vector<ParameterLayout> layouts_of(const torch::nn::Module& module) {
  std::vector<ParameterLayout> layouts;
  std::vector<std::string> keys;
  for (const auto& each : module.named_parameters()) {
    const at::Tensor& parameter = each.value();
    if (!tessera::is_dtensor(parameter)) continue;
    const std::string key =
        fmt::format("{} {}", parameter.dim(), tessera::to_string(tessera::placements_of(parameter)));
    const auto known = std::ranges::find(keys, key);
    if (known != keys.end()) {
      ++layouts[static_cast<std::size_t>(known - keys.begin())].others;
    } else {
      keys.push_back(key);
      layouts.push_back({.parameter = each.key(), .others = 0, .picture = tessera::visualize_svg(parameter)});
    }
  }
  return layouts;
}

}  // namespace train
