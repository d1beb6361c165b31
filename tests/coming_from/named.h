#pragma once

#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/tests/harness/assertion_counts.h"

// Checks that every name and parameter of the other libraries has a row on docs/coming-from.md, and assertions in the
// test of its name.
namespace tessera::testing {

// A row of a table by its first cell: the names and, after a colon, their parameters. Both are `spans`; text between
// spans, separated by semicolons, counts too. A cell without spans is one name.
//   | `ColumnParallelLinear`, `RowParallelLinear`: `bias`, `stride` | ... |
struct NamedRow {
  std::vector<std::string> names;
  std::vector<std::string> parameters;
  std::string ours;  // the second cell
};
NamedRow parse_row(const std::string& line);
// Returns the rows of each section by its heading, without the tables' heads.
std::map<std::string, std::vector<NamedRow>> rows_of(const std::string& page);

// The functions below take documents: {DOCUMENT: {"section": HEADING, "names": {NAME: [PARAMETER, ...]}}}.

// Returns what is missing on the page, one line each: a row of the section for a name, or for a parameter together with
// its name, and our side of a row.
std::vector<std::string> missing_rows(const nlohmann::json& documents, const std::string& page);

// Test cases by their names, with their subcases.
using Cases = std::map<std::string, std::vector<std::string>>;

// Returns the test case of each name, with a subcase of each parameter. The case has the name itself; where several
// documents have the name, the first three characters of the document come before it: "000 ColumnParallelLinear".
Cases cases_of(const nlohmann::json& documents);

// Returns the cases, and the subcases directly in them, in which no assertion ran, one line each.
std::vector<std::string> without_assertions(const Cases& cases, const AssertionCounts& counts);

}  // namespace tessera::testing
