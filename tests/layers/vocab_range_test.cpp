#include "tessera/layers/vocab_range.h"

#include <stdexcept>
#include <vector>

#include <doctest/doctest.h>

using namespace tessera;

TEST_CASE("divide: whole numbers alone") {
  CHECK(divide(12, 4) == 3);
  CHECK(divide(0, 3) == 0);
  CHECK_THROWS_WITH_AS(divide(10, 4, "layer"), "layer: 10 is not divisible by 4", std::invalid_argument);
  CHECK_THROWS_WITH_AS(divide(10, 0), "divide: the number of parts is 0; give at least 1", std::invalid_argument);
}

TEST_CASE("vocab ranges: uneven vocabularies are refused, or in chunks") {
  CHECK_THROWS_WITH_AS(vocab_range_from_global_vocab_size(10, 0, 4),
                       "vocab_range_from_global_vocab_size: 10 is not divisible by 4", std::invalid_argument);
  const std::vector<Interval> parts = {{0, 3}, {3, 6}, {6, 9}, {9, 10}};
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    CHECK(vocab_range_from_global_vocab_size(10, static_cast<int64_t>(rank), 4, true) == parts[rank]);
  }
  CHECK(vocab_range_from_global_vocab_size(2, 3, 4, true).size() == 0);
}

TEST_CASE("vocab ranges: ranks and sizes that there are not") {
  CHECK_THROWS_WITH_AS(vocab_range_from_global_vocab_size(8, 4, 4), doctest::Contains("rank 4 is outside [0, 4)"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(vocab_range_from_per_partition_vocab_size(-1, 0, 4), doctest::Contains("a vocabulary of -1 ids"),
                       std::invalid_argument);
}
