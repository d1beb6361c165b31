#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/mesh/collectives/checked_cases.h"

using namespace tessera;

TESSERA_RANKS_TEST_CASE("over Gloo: whatever ranks disagree on is found before anything moves", {2, 3}) {
  testing::check_disagreements(testing::world());
}

TESSERA_RANKS_TEST_CASE("over Gloo: a correct program is unchanged, and so are its counts", {1, 2, 3}) {
  testing::check_agreement(testing::world());
}
