#pragma once

#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

// Whether every name and parameter of the libraries that people come from has a row on docs/coming-from.md and a call
// in a test.
namespace tessera::testing {

// A row of a table, by its first cell: the names, and behind a colon parameters of theirs. Both are `spans`; what
// stands beside spans between semicolons counts too, and a cell without spans is one name as it is.
//   | `ColumnParallelLinear`, `RowParallelLinear`: `bias`, `stride` | ... |
struct NamedRow {
  std::vector<std::string> names;
  std::vector<std::string> parameters;
  std::string ours;  // the second cell
};
NamedRow parse_row(const std::string& line);
// The rows of each section, by its heading, but for the heads of tables.
std::map<std::string, std::vector<NamedRow>> rows_of(const std::string& page);

// Test files, by their paths.
using Sources = std::map<std::string, std::string>;

// names: {DOCUMENT: {NAME: [PARAMETER, ...]}}.
// calls: {"tests": {KEY: {"file": PATH, "case": NAME OF A TEST CASE IN IT}},
//         "documents": {DOCUMENT: {"section": HEADING, "calls": {NAME: {"": [KEY, CALL], PARAMETER: [KEY, CALL]}}}}}
// with "" for the name itself. What is missing, one line each: a row of the section for a name, or for a parameter
// together with its name; our side of it; a call, which has to stand in the case or in what that names in its file
// (source_code.h); and what `calls` has that `names` has not.
std::vector<std::string> missing_names(const nlohmann::json& names, const nlohmann::json& calls,
                                       const std::string& page, const Sources& sources);

// Of `cases` those that are no test case of a source, by the whole name.
std::vector<std::string> missing_cases(const std::vector<std::string>& cases, const Sources& sources);

}  // namespace tessera::testing
