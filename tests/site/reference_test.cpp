// Checks the list of public headers, for which the site need not be built.

#include <doctest/doctest.h>

#include "tessera/tests/ground/source_tree.h"
#include "tessera/tests/harness/shell.h"

TEST_CASE("site: the reference has every header that users reach, or says that it is internal") {
  const tessera::testing::ShellOutcome outcome = tessera::testing::shell(
      "../tessera_environment/python -B tests/site/public_headers.py " + tessera::testing::source_root().string());
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 0);
}
