// That a benchmark of several processes runs: its ranks and the peer's come, give the same elements, and are measured.

#include <fstream>
#include <string>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tessera/tests/harness/shell.h"
#include "tessera/tools/launcher/private_folder.h"

using tessera::testing::shell;
using tessera::testing::ShellOutcome;

TEST_CASE("bench redistribute: every row is measured, ours and raw; the peer's where it has the redistribution") {
  const tessera::PrivateFolder folder;
  const std::string file = folder.path() + "/figures.json";
  const ShellOutcome outcome = shell(
      "TESSERA_PYTHON=$PYTHON timeout 200 bench/redistribute --quick --launch tools/launcher/launch "
      "--peer bench/redistribute_peer.py --json " +
      file);
  CAPTURE(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  const nlohmann::json figures = nlohmann::json::parse(std::ifstream(file));
  REQUIRE(figures["rows"].size() == 24);
  for (const nlohmann::json& row : figures["rows"]) {
    const std::string name = row["name"];
    CAPTURE(name);
    CHECK(row["ours_us"] > 0);
    CHECK(row["raw_us"] > 0);
    const bool to_partial = name.ends_with(";P(sum)");  // the peer has none
    CHECK(row.contains("peer_us") == !to_partial);
    const bool is_local = name.find(";R;") != std::string::npos || to_partial;
    CHECK(row["communicates"] == !is_local);
  }
}

TEST_CASE("bench redistribute: ranks that cannot start are told") {
  const ShellOutcome outcome = shell("bench/redistribute --quick --launch /bin/false --peer bench/redistribute_peer.py");
  CHECK(outcome.exit_code == 1);
  CHECK(outcome.output.find("ours: it ended before its ranks came") != std::string::npos);
}
