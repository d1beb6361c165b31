#pragma once

#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

// Checks that every name and parameter of the other libraries has a row on docs/coming-from.md and a call in a test.
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

// Test files by their paths.
using Sources = std::map<std::string, std::string>;

// names: {DOCUMENT: {NAME: [PARAMETER, ...]}}. calls: {"tests": {KEY: {"file": PATH, "case": NAME OF A TEST CASE IN
// IT}},
//         "documents": {DOCUMENT: {"section": HEADING, "calls": {NAME: {"": [KEY, CALL], PARAMETER: [KEY, CALL]}}}}}
// "" stands for the name itself. Returns what is missing, one line each: a row of the section for a name, or for a
// parameter together with its name; our side of it; a call, which must occur in the test case or in what that uses of
// its file (source_code.h); and what `calls` has that `names` does not have.
std::vector<std::string> missing_names(const nlohmann::json& names, const nlohmann::json& calls,
                                       const std::string& page, const Sources& sources);

// Returns those of `cases` that are not the whole name of a test case.
std::vector<std::string> missing_cases(const std::vector<std::string>& cases, const Sources& sources);

}  // namespace tessera::testing
