#pragma once

#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace tessera::bench {

// Holds the median of ratios, and its 95% confidence interval. The two times of a ratio are measured in one round, so
// that drift affects both equally. The interval lies between two elements of the sorted sample, chosen by the binomial
// distribution. Fewer than 6 ratios have no such interval; then it is the range of the sample.
struct Ratio {
  double median = 0;
  double low = 0;
  double high = 0;
};
// Returns the ratio of the a[i] / b[i]. Throws std::invalid_argument when a and b differ in length or are empty.
Ratio ratio_of(const std::vector<double>& a, const std::vector<double>& b);
// Returns text such as "1.020 [1.010, 1.040]".
std::string to_string(const Ratio& ratio);
// Puts "NAME" and "NAME_interval" into `row`.
void put(nlohmann::json& row, const std::string& name, const Ratio& ratio);

}  // namespace tessera::bench
