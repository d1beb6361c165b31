// Tests Checked among ranks that are threads; checked_ranks_test does so over Gloo.
#include "tessera/mesh/collectives/checked.h"

#include <stdexcept>

#include <doctest/doctest.h>

#include "tessera/mesh/environment.h"
#include "tessera/mesh/in_process.h"
#include "tessera/tests/mesh/collectives/checked_cases.h"

using namespace tessera;

TEST_CASE("ranks that are threads: whatever ranks disagree on is found before anything moves") {
  for (const int64_t size : {2, 3, 8}) run_in_process(size, testing::check_disagreements);
}

TEST_CASE("ranks that are threads: a correct program is unchanged, and so are its counts") {
  for (const int64_t size : {1, 2, 4}) run_in_process(size, testing::check_agreement);
}

TEST_CASE("Checked is of one World, and ends with the guard") {
  const auto first = World::fake(0, 2), second = World::create({});
  const bool before = Checked::enabled(*second);
  {
    const Checked on(*second);
    CHECK(Checked::enabled(*second));
    const Checked off(*second, false);
    CHECK_FALSE(Checked::enabled(*second));
  }
  CHECK(Checked::enabled(*second) == before);
  const Checked on(*first);
  CHECK_FALSE(Checked::enabled(*first));  // a fake group moves nothing that could be compared
}

TEST_CASE("TESSERA_CHECKED is 0 or 1") {
  CHECK_FALSE(checked_by({}));
  CHECK_FALSE(checked_by({{"TESSERA_CHECKED", "0"}}));
  CHECK(checked_by({{"TESSERA_CHECKED", "1"}}));
  CHECK(resolve_environment({{"TESSERA_CHECKED", "1"}}).checked);
  CHECK_THROWS_WITH_AS(checked_by({{"TESSERA_CHECKED", "yes"}}), "environment: TESSERA_CHECKED=yes is neither 0 nor 1",
                       std::invalid_argument);
}
