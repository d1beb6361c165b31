#include "tessera/examples/embed/report.h"

#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace embed {
namespace {

const std::vector<std::string> kThree = {"a cat", "a kitten", "dough"};
const Matrix kSimilar = {{1.0F, 0.75F, -0.125F}, {0.75F, 1.0F, 0.5F}, {-0.125F, 0.5F, 1.0F}};

TEST_CASE("nearest: the most similar other row, the first among equals, -1 when alone") {
  CHECK(nearest(kSimilar) == std::vector<int64_t>{1, 0, 1});
  CHECK(nearest({{1, 0.5, 0.5}, {0.5, 1, 0.5}, {0.5, 0.5, 1}}) == std::vector<int64_t>{1, 0, 0});
  CHECK(nearest({{1}}) == std::vector<int64_t>{-1});
  CHECK(nearest({{1, -1}, {-1, 1}}) == std::vector<int64_t>{1, 0});
}

TEST_CASE("the tables line up, by characters and not by bytes") {
  CHECK(similarity_table(kThree, kSimilar) ==
        "    1  a cat\n"
        "    2  a kitten\n"
        "    3  dough\n"
        "\n"
        "          1     2     3\n"
        "    1  1.00  0.75 -0.12\n"
        "    2  0.75  1.00  0.50\n"
        "    3 -0.12  0.50  1.00\n");
  CHECK(nearest_table({"a cät", "a kitten", "dough"}, kSimilar) ==
        "  a cät     ->  a kitten  0.75\n"
        "  a kitten  ->  a cät     0.75\n"
        "  dough     ->  a kitten  0.50\n");
  CHECK(nearest_table({"alone"}, {{1}}) == "  alone  ->  no other sentence\n");
  CHECK(weight_table({2500, 2500}, 10000) ==
        "  one process  10,000 bytes\n"
        "  rank 0       2,500 bytes   25.0%\n"
        "  rank 1       2,500 bytes   25.0%\n");
}

TEST_CASE("the last line is the verdict's") {
  CHECK(difference_line(1.19e-7F) == "largest difference from one process: 1.2e-07");
  CHECK(difference_line(0.0F) == "largest difference from one process: 0");
  CHECK(is_close_enough(0.0F));
  CHECK(is_close_enough(1e-5F));
  CHECK_FALSE(is_close_enough(1.1e-5F));
  CHECK_FALSE(is_close_enough(std::numeric_limits<float>::quiet_NaN()));
}

TEST_CASE("numbers and long sentences") {
  CHECK(with_commas(0) == "0");
  CHECK(with_commas(999) == "999");
  CHECK(with_commas(90868376) == "90,868,376");
  CHECK(with_commas(-1234) == "-1,234");
  CHECK(shortened("häuser", 6) == "häuser");
  CHECK(shortened("häuser", 5) == "häus…");
}

}  // namespace
}  // namespace embed
