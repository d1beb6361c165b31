// The run of tools/train as it is by default, and its report in a browser: for tools/test --full.

#include <regex>
#include <string>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/tests/harness/shell.h"
#include "tessera/tests/harness/text.h"
#include "tessera/tools/launcher/private_folder.h"

using tessera::testing::contains;
using tessera::testing::shell;
using tessera::testing::ShellOutcome;

TEST_CASE("train: the default run predicts better than the order-2 model by 0.1 bits, and its report is well seen") {
  const tessera::PrivateFolder folder;
  const std::string run = folder.path() + "/run";
  const ShellOutcome outcome =
      shell("timeout 3000 tools/launcher/launch --no-prefix -n 4 examples/train/train --run " + run);
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 0);
  std::smatch match;
  REQUIRE(std::regex_search(outcome.output, match,
                            std::regex("\nvalidation: ([0-9.]+) bits per byte \\(order-2 bytes: ([0-9.]+)\\)\n(?:.*\n)?"
                                       "largest difference from one process: ([0-9.e+-]+)\n$")));
  CHECK(std::stod(match[1].str()) <= std::stod(match[2].str()) - 0.1);
  CHECK(std::stod(match[3].str()) <= 1e-9);

  const ShellOutcome looked = shell(
      fmt::format("../tessera_environment/docs_python -B tests/site/browser.py {0} {0}/pictures report.html", run));
  CAPTURE(looked.output);
  CHECK(looked.exit_code == 0);
  CHECK(contains(looked.output, "1 pages at 2 widths, 0 problems"));
}
