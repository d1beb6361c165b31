#pragma once

#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace tessera::bench {

// The median of ratios whose two times were measured in one round, so that drift meets both alike, and its 95%
// interval: of the sample in order the elements that the true median lies between, by the binomial distribution. Fewer
// than 6 have none: then it is the whole sample's.
struct Ratio {
  double median = 0;
  double low = 0;
  double high = 0;
};
// Of each a over its b. Throws std::invalid_argument when they are not as many.
Ratio ratio_of(const std::vector<double>& a, const std::vector<double>& b);
// "1.02 [1.01, 1.04]"
std::string to_string(const Ratio& ratio);
// Puts "NAME" and "NAME_interval" into `row`.
void put(nlohmann::json& row, const std::string& name, const Ratio& ratio);

}  // namespace tessera::bench
