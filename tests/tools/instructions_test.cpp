// Counts the instructions that a DTensor adds to a call, so that a regression shows on any machine. The limits are for
// the libraries as tests build them (-O1), 5% above what was counted; tools/bench instructions builds them as users do.

#include <fstream>
#include <string>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tessera/tests/harness/shell.h"
#include "tessera/tools/launcher/private_folder.h"

using tessera::testing::shell;
using tessera::testing::ShellOutcome;

namespace {

struct Limit {
  const char* row;
  double added;  // instructions per call more than with plain tensors
};

#ifdef __clang__
constexpr Limit kLimits[] = {
    {"add", 1940},
    {"mm", 1760},
    {"view", 2160},
    {"detach", 1910},
    {"mul_by_a_number", 1800},  // with the rows before it both calls vary by a hundred, as malloc does
    {"add_", 1270},
    {"cat_of_2", 2540},  // the plain call itself varies by a hundred
    {"layer_norm", 4400},
    {"softmax", 1760},
    {"sdpa", 4300},  // the kernel itself varies by some hundreds; 300 look at how keys, values and tangents lie
    {"foreach_add_of_100", 89500},
    {"from_local", 4480},
    {"five_operators_and_back", 26000},  // malloc in it varies by fifteen hundred
    {"S(0)_to_itself", 1240},
    {"R_to_S(0)", 8080},
    {"S(0)_to_R", 17210},
    {"S(0)_to_S(1)", 21480},
    {"P_to_S(0)", 16170},
    {"P_to_R", 16170},
};
#else
constexpr Limit kLimits[] = {
    {"add", 2100},
    {"mm", 1900},
    {"view", 2440},
    {"detach", 2150},
    {"mul_by_a_number", 1970},
    {"add_", 1400},
    {"cat_of_2", 2440},
    {"layer_norm", 4420},
    {"softmax", 1890},
    {"sdpa", 5400},  // the kernel itself varies by some hundreds
    {"foreach_add_of_100", 87250},
    {"from_local", 4810},
    {"five_operators_and_back", 28350},
};
#endif

}  // namespace

TEST_CASE("bench instructions: a cached call adds no more than it did") {
  const tessera::PrivateFolder folder;
  const std::string file = folder.path() + "/figures.json";
  std::string rows;
  for (const Limit& limit : kLimits) rows += std::string(" '") + limit.row + "'";
  const ShellOutcome outcome = shell("bench/instructions --json " + file + " --rows" + rows);
  CAPTURE(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  const nlohmann::json figures = nlohmann::json::parse(std::ifstream(file));
  REQUIRE(figures["rows"].size() == std::size(kLimits));
  for (std::size_t i = 0; i < std::size(kLimits); ++i) {
    const nlohmann::json& row = figures["rows"][i];
    CAPTURE(kLimits[i].row);
    CHECK(row["name"] == kLimits[i].row);
    CHECK(row["ours"] > row["plain"]);
    CHECK(row["added"] <= kLimits[i].added);
  }
}

TEST_CASE("bench instructions: an unknown row is reported") {
  const ShellOutcome outcome = shell("bench/instructions --rows no_such_row");
  CHECK(outcome.exit_code == 1);
  CHECK(outcome.output.find("no row is called no_such_row") != std::string::npos);
}
