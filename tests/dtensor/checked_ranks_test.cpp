// Tests the same as checked_test, on ranks that are processes.

#include "tessera/tests/dtensor/checked_cases.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera::testing;

TESSERA_RANKS_TEST_CASE("over Gloo: a plain operand that is not the same on every rank is refused", {2}) {
  check_unequal(world());
}
