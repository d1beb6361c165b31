// Compares docs/coming-from-dtensor.md with the names that PyTorch has, which dtensor_names.json lists, and with the
// code in the test cases of these names.

#include <filesystem>
#include <map>
#include <regex>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tessera/tests/docs/pages.h"
#include "tessera/tests/ground/source_tree.h"
#include "tessera/tests/harness/shell.h"

namespace {

namespace fs = std::filesystem;
using namespace tessera::testing;
using nlohmann::json;
using Complaints = std::vector<std::string>;

constexpr const char* kNotThere = "What is not there";

struct Row {
  std::string section;
  std::vector<std::string> names;  // the spans of the first cell: a name, or a name with its parameters in brackets
  std::vector<std::string> code;   // the spans of the second cell
  std::string second;              // the second cell itself
};

std::string name_of(const std::string& span) { return span.substr(0, span.find('(')); }

// Returns the rows of all tables of the page, without the tables' heads.
std::vector<Row> rows_of(const std::string& page) {
  std::vector<Row> rows;
  std::string section;
  for (const std::string& line : lines_of(page)) {
    if (line.starts_with("## ")) section = line.substr(3);
    if (!line.starts_with("| `")) continue;
    const std::vector<std::string> cells = all_matches(line.substr(1), "([^|]*)\\|");
    rows.push_back(
        {section, all_matches(cells.at(0), "`([^`]+)`"), all_matches(cells.at(1), "`([^`]+)`"), cells.at(1)});
  }
  return rows;
}

// Returns the code of each test case by its name, without comments and white space.
std::map<std::string, std::string> cases_of(std::string source) {
  source = std::regex_replace(source, std::regex("//[^\n]*"), "");
  std::map<std::string, std::string> cases;
  const std::regex start("TEST_CASE\\(\"([^\"]+)\"");
  for (std::sregex_iterator it(source.begin(), source.end(), start), end; it != end; ++it) {
    const auto next = std::next(it);
    const auto begin = static_cast<std::size_t>(it->position());
    const std::size_t stop = next == end ? source.size() : static_cast<std::size_t>(next->position());
    cases[(*it)[1]] = squeezed(source.substr(begin, stop - begin));
  }
  return cases;
}

void check_row(const Row& row, const std::map<std::string, std::string>& cases, Complaints& complaints) {
  const std::string name = name_of(row.names.front());
  const auto found = cases.find(name);
  if (found == cases.end()) complaints.push_back(name + " has no test case of its name");
  if (row.code.empty()) complaints.push_back(name + " has a row without code");
  for (const std::string& code : row.code) {
    if (found != cases.end() && found->second.find(squeezed(code)) == std::string::npos) {
      complaints.push_back("the test case of " + name + " does not have the code of its row: " + code);
    }
  }
}

// Returns what is wrong with the page: names without a row or with two, rows of names that are none, parameters that
// differ, and rows whose code is not in the test case of the row's first name.
Complaints complaints_of(const std::string& page, const json& names, const std::string& source) {
  Complaints complaints;
  std::map<std::string, int> rows_with;
  std::map<std::string, std::string> signatures, module_of;
  for (const auto& [module, of_module] : names.items()) {
    for (const auto& [name, parameters] : of_module.items()) {
      std::string list;
      for (const std::string each : parameters) list += (list.empty() ? "" : ", ") + each;
      signatures[name] = name + "(" + list + ")";
      module_of[name] = module;
    }
  }
  const auto cases = cases_of(source);
  for (const Row& row : rows_of(page)) {
    for (const std::string& span : row.names) {
      const std::string name = name_of(span);
      ++rows_with[name];
      if (!signatures.contains(name)) {
        complaints.push_back(name + " is no name of PyTorch's");
      } else if (row.section == kNotThere) {
        if (span != name || squeezed(row.second).empty()) complaints.push_back(name + " has a row that says nothing");
      } else if (span != name ? span != signatures[name] : signatures[name] != name + "()") {
        complaints.push_back(span + " is " + signatures[name] + " in PyTorch");
      } else if (row.section != module_of[name]) {
        complaints.push_back(name + " is in " + module_of[name] + ", not in " + row.section);
      }
    }
    if (row.section != kNotThere) check_row(row, cases, complaints);
  }
  for (const auto& [name, ignored] : signatures) {
    if (rows_with[name] != 1) complaints.push_back(name + " has " + std::to_string(rows_with[name]) + " rows");
  }
  return complaints;
}

const json kNames = {{"torch.a", {{"one", {"x", "y"}}, {"Two", json::array()}, {"three", {"z"}}}}};
const std::string kPage =
    "# Page\n\n## torch.a\n\n| theirs | ours | what differs |\n| --- | --- | --- |\n| `one(x, y)` | `f(1)`, `g()` | |\n"
    "| `Two` | `h(2)` | more |\n\n## What is not there\n\n| theirs | instead |\n| --- | --- |\n| `three` | nothing |\n";
const std::string kSource =
    "TEST_CASE(\"one\") {\n  CHECK(f( 1 ));\n  g();  // k(3)\n}\nTESSERA_RANKS_TEST_CASE(\"Two\", {4}) { h(2); }\n";

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

Complaints with(const std::string& from, const std::string& to) {
  return complaints_of(replaced(kPage, from, to), kNames, kSource);
}

}  // namespace

TEST_CASE("docs: every public name of PyTorch's DTensor has a row, and every row's code is in the case of its name") {
  const fs::path root = source_root();
  std::string source;
  for (const char* file : {"from_dtensor_test.cpp", "from_dtensor_modules_test.cpp"}) {
    source += read_file(root / "tests/docs" / file);
  }
  const json names = json::parse(read_file(root / "tests/docs/dtensor_names.json"));
  const std::string page = read_file(root / "docs/coming-from-dtensor.md");
  for (const std::string& each : complaints_of(page, names, source)) FAIL_CHECK(each);
  CHECK(names.size() == 7);
  CHECK(rows_of(page).size() > 60);
}

TEST_CASE("docs: the list of PyTorch's names is that of the installed PyTorch") {
  const ShellOutcome outcome =
      shell("../tessera_environment/python " + (source_root() / "tests/docs/dtensor_names.py").string());
  CAPTURE(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  CHECK(json::parse(outcome.output) == json::parse(read_file(source_root() / "tests/docs/dtensor_names.json")));
}

TEST_CASE("docs: what a page on PyTorch's names lacks is reported") {
  CHECK(complaints_of(kPage, kNames, kSource).empty());
  CHECK(with("| `Two` | `h(2)` | more |\n", "") == Complaints{"Two has 0 rows"});
  CHECK(with("`three`", "`Two`") == Complaints{"Two has 2 rows", "three has 0 rows"});
  CHECK(with("`three`", "`three`, `four`") == Complaints{"four is no name of PyTorch's"});
  CHECK(with("`one(x, y)`", "`one(x)`") == Complaints{"one(x) is one(x, y) in PyTorch"});
  CHECK(with("`one(x, y)`", "`one`") == Complaints{"one is one(x, y) in PyTorch"});
  CHECK(with("## torch.a", "## torch.b").size() == 2);
  CHECK(with("| nothing |", "| |") == Complaints{"three has a row that says nothing"});
  CHECK(with("`h(2)`", "") == Complaints{"Two has a row without code"});
  CHECK(with("`g()`", "`g(1)`") == Complaints{"the test case of one does not have the code of its row: g(1)"});
  CHECK(with("`g()`", "`k(3)`").size() == 1);
  CHECK(with("`g()`", "`h(2)`").size() == 1);
  CHECK(complaints_of(kPage, kNames, replaced(kSource, "\"Two\"", "\"other\"")) ==
        Complaints{"Two has no test case of its name"});
}
