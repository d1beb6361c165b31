#include "tessera/bench/paired.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace tessera::bench {
namespace {

// Returns how many of `n` sorted elements lie outside the interval at each end: the largest k for which n throws of a
// coin give at most k heads with a probability of at most 2.5%, or 0.
std::size_t outside(std::size_t n) {
  const auto count = static_cast<double>(n);
  double below = 0;
  for (std::size_t k = 0; 2 * k < n; ++k) {
    const auto heads = static_cast<double>(k);
    below += std::exp(std::lgamma(count + 1) - std::lgamma(heads + 1) - std::lgamma(count - heads + 1) -
                      count * std::log(2.0));
    if (below > 0.025) return k > 0 ? k - 1 : 0;
  }
  return 0;
}

}  // namespace

Ratio ratio_of(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size() || a.empty()) {
    throw std::invalid_argument(
        fmt::format("ratio_of: {} and {} times; give equally many, at least one", a.size(), b.size()));
  }
  std::vector<double> all;
  for (std::size_t i = 0; i < a.size(); ++i) all.push_back(a[i] / b[i]);
  std::sort(all.begin(), all.end());
  const std::size_t middle = all.size() / 2, cut = outside(all.size());
  return {.median = all.size() % 2 == 1 ? all[middle] : (all[middle - 1] + all[middle]) / 2,
          .low = all[cut],
          .high = all[all.size() - 1 - cut]};
}

std::string to_string(const Ratio& ratio) {
  return fmt::format("{:.3f} [{:.3f}, {:.3f}]", ratio.median, ratio.low, ratio.high);
}

void put(nlohmann::json& row, const std::string& name, const Ratio& ratio) {
  row[name] = ratio.median;
  row[name + "_interval"] = {ratio.low, ratio.high};
}

}  // namespace tessera::bench
