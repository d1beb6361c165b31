#include "tessera/tests/coming_from/named.h"

#include <algorithm>
#include <regex>
#include <set>
#include <sstream>

#include <fmt/format.h>

#include "tessera/tests/coming_from/source_code.h"

namespace tessera::testing {
namespace {

using nlohmann::json;
using Complaints = std::vector<std::string>;

std::string trimmed(const std::string& text) {
  const auto begin = text.find_first_not_of(" \t");
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, at);) parts.push_back(trimmed(part));
  return parts;
}

// Returns the spans of a list, and the text between them.
std::vector<std::string> items_of(const std::string& list) {
  std::vector<std::string> items;
  const std::regex span("`([^`]+)`");
  for (std::sregex_iterator it(list.begin(), list.end(), span), end; it != end; ++it) items.push_back((*it)[1]);
  for (const std::string& beside : split(std::regex_replace(list, span, ";"), ';')) {
    if (!beside.empty() && beside != ",") items.push_back(beside);
  }
  return items;
}

// Returns the position of the colon after the names, or npos.
std::size_t colon_of(const std::string& cell) {
  bool inside = false;
  for (std::size_t i = 0; i < cell.size(); ++i) {
    if (cell[i] == '`') inside = !inside;
    if (cell[i] == ':' && !inside) return i;
  }
  return std::string::npos;
}

bool contains(const std::vector<std::string>& list, const std::string& item) {
  return std::find(list.begin(), list.end(), item) != list.end();
}

// The parts of a page, the calls and the tests that one check reads.
struct Check {
  const json& calls;
  const Sources& sources;
  Complaints complaints;

  void row(const std::string& what, const std::vector<NamedRow>& rows, const std::string& name,
           const std::string& parameter) {
    bool found = false;
    for (const NamedRow& row : rows) {
      if (!contains(row.names, name) || (!parameter.empty() && !contains(row.parameters, parameter))) continue;
      found = true;
      if (row.ours.empty()) complaints.push_back(what + " has a row without our side");
    }
    if (!found) complaints.push_back(what + " has no row");
  }

  void call(const std::string& what, const json& entry) {
    if (!entry.is_array() || entry.size() != 2) {
      complaints.push_back(what + " has no call");
      return;
    }
    const std::string key = entry[0], text = entry[1];
    const json tests = calls.value("tests", json::object());
    if (!tests.contains(key)) {
      complaints.push_back(fmt::format("{} is called in \"{}\", which is no test", what, key));
      return;
    }
    const std::string file = tests[key].value("file", ""), test_case = tests[key].value("case", "");
    const auto source = sources.find(file);
    const std::string code = source == sources.end() ? "" : code_of_case(source->second, test_case);
    if (code.empty()) {
      complaints.push_back(fmt::format("{} is called in \"{}\", of which there is no file or no case", what, key));
    } else if (bare(text).empty() || code.find(bare(text)) == std::string::npos) {
      complaints.push_back(fmt::format("{}: \"{}\" in {} does not come by `{}`", what, test_case, file, text));
    }
  }

  void document(const std::string& name, const json& names, const json& entry, const std::vector<NamedRow>& rows) {
    const json all = entry.value("calls", json::object());
    for (const auto& [theirs, parameters] : names.items()) {
      const json of_name = all.value(theirs, json::object());
      const auto list = parameters.get<std::vector<std::string>>();
      std::set<std::string> wanted(list.begin(), list.end());
      wanted.insert("");
      for (const std::string& parameter : wanted) {
        const std::string what = fmt::format("{}: {}{}{}", name, theirs, parameter.empty() ? "" : ", ", parameter);
        row(what, rows, theirs, parameter);
        call(what, of_name.value(parameter, json()));
      }
      for (const auto& [key, ignored] : of_name.items()) {
        if (!wanted.contains(key)) complaints.push_back(fmt::format("{}: {} has no {}", name, theirs, key));
      }
    }
    for (const auto& [theirs, ignored] : all.items()) {
      if (!names.contains(theirs)) complaints.push_back(fmt::format("{} has no {}", name, theirs));
    }
  }
};

}  // namespace

NamedRow parse_row(const std::string& line) {
  const std::vector<std::string> cells = split(line, '|');  // the cell before the first bar is empty
  if (cells.size() < 3) return {};
  const std::string& first = cells[1];
  if (first.find('`') == std::string::npos) return {.names = {first}, .parameters = {}, .ours = cells[2]};
  const std::size_t colon = colon_of(first);
  if (colon == std::string::npos) return {.names = items_of(first), .parameters = {}, .ours = cells[2]};
  return {.names = items_of(first.substr(0, colon)), .parameters = items_of(first.substr(colon + 1)), .ours = cells[2]};
}

std::map<std::string, std::vector<NamedRow>> rows_of(const std::string& page) {
  std::map<std::string, std::vector<NamedRow>> rows;
  std::string section;
  std::istringstream lines(page);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("## ")) section = line.substr(3);
    if (!line.starts_with("| ") || line.starts_with("| ---") || line.starts_with("| theirs |")) continue;
    rows[section].push_back(parse_row(line));
  }
  return rows;
}

Complaints missing_names(const json& names, const json& calls, const std::string& page, const Sources& sources) {
  Check check{.calls = calls, .sources = sources, .complaints = {}};
  const auto rows = rows_of(page);
  const json documents = calls.value("documents", json::object());
  for (const auto& [document, its_names] : names.items()) {
    const json entry = documents.value(document, json::object());
    const auto section = rows.find(entry.value("section", ""));
    check.document(document, its_names, entry, section == rows.end() ? std::vector<NamedRow>() : section->second);
  }
  for (const auto& [document, ignored] : documents.items()) {
    if (!names.contains(document)) check.complaints.push_back("there is no document " + document);
  }
  return check.complaints;
}

Complaints missing_cases(const std::vector<std::string>& cases, const Sources& sources) {
  Complaints missing;
  for (const std::string& each : cases) {
    const auto whole = [&](const auto& source) { return !code_of_case(source.second, each).empty(); };
    if (std::none_of(sources.begin(), sources.end(), whole)) missing.push_back(each + " is no test case");
  }
  return missing;
}

}  // namespace tessera::testing
