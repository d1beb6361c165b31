// Tests medians of paired ratios and their intervals, which benchmarks report.

#include "tessera/bench/paired.h"

#include <stdexcept>
#include <vector>

#include <doctest/doctest.h>

using tessera::bench::Ratio;
using tessera::bench::ratio_of;

namespace {

// Returns the ratios n, n - 1, ..., 1 over 1.
Ratio of_numbers_to(int n) {
  std::vector<double> a;
  for (int i = n; i >= 1; --i) a.push_back(i);
  return ratio_of(a, std::vector<double>(a.size(), 1.0));
}

}  // namespace

TEST_CASE("the median of ratios lies between order statistics by the binomial distribution") {
  struct Row {
    int n;
    double median, low, high;
  };
  // By tables of the sign test, 51 numbers omit 18 at each end, 9 omit one, 6 none; 5 do not reach 95%.
  for (const Row& row : {Row{51, 26, 19, 33}, Row{50, 25.5, 18, 33}, Row{9, 5, 2, 8}, Row{6, 3.5, 1, 6},
                         Row{5, 3, 1, 5}, Row{1, 1, 1, 1}}) {
    CAPTURE(row.n);
    const Ratio got = of_numbers_to(row.n);
    CHECK(got.median == row.median);
    CHECK(got.low == row.low);
    CHECK(got.high == row.high);
  }
}

TEST_CASE("each time goes over its own pair") {
  const Ratio got = ratio_of({2, 30, 8}, {1, 10, 2});
  CHECK(got.median == 3);
  CHECK(to_string(got) == "3.000 [2.000, 4.000]");
  CHECK_THROWS_WITH_AS(ratio_of({1, 2}, {1}), "ratio_of: 2 and 1 times; give equally many, at least one",
                       std::invalid_argument);
}
