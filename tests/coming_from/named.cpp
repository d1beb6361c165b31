#include "tessera/tests/coming_from/named.h"

#include <algorithm>
#include <regex>
#include <sstream>

#include <fmt/format.h>

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

// Returns what the rows lack of a parameter, or of the name itself where `parameter` is empty.
Complaints missing_in(const std::vector<NamedRow>& rows, const std::string& document, const std::string& name,
                      const std::string& parameter) {
  const std::string what = fmt::format("{}: {}{}{}", document, name, parameter.empty() ? "" : ", ", parameter);
  Complaints complaints;
  bool found = false;
  for (const NamedRow& row : rows) {
    if (!contains(row.names, name) || (!parameter.empty() && !contains(row.parameters, parameter))) continue;
    found = true;
    if (row.ours.empty()) complaints.push_back(what + " has a row without our side");
  }
  if (!found) complaints.push_back(what + " has no row");
  return complaints;
}

// Says whether an assertion ran in the case and, where `subcase` is not empty, in that subcase or one in it.
bool has_assertion(const AssertionCounts& counts, const std::string& test_case, const std::string& subcase) {
  return std::ranges::any_of(counts, [&](const auto& entry) {
    const AssertionPlace& place = entry.first;
    const bool inside =
        !place.empty() && place[0] == test_case && (subcase.empty() || (place.size() > 1 && place[1] == subcase));
    return inside && entry.second > 0;
  });
}

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

Complaints missing_rows(const json& documents, const std::string& page) {
  const auto rows = rows_of(page);
  Complaints complaints;
  const auto add = [&](const Complaints& more) { complaints.insert(complaints.end(), more.begin(), more.end()); };
  for (const auto& [document, entry] : documents.items()) {
    const auto section = rows.find(entry.at("section").get<std::string>());
    const std::vector<NamedRow> its_rows = section == rows.end() ? std::vector<NamedRow>() : section->second;
    for (const auto& [name, parameters] : entry.at("names").items()) {
      add(missing_in(its_rows, document, name, ""));
      for (const std::string parameter : parameters) add(missing_in(its_rows, document, name, parameter));
    }
  }
  return complaints;
}

Cases cases_of(const json& documents) {
  std::map<std::string, int> holders;
  for (const json& entry : documents) {
    for (const auto& [name, parameters] : entry.at("names").items()) ++holders[name];
  }
  Cases cases;
  for (const auto& [document, entry] : documents.items()) {
    for (const auto& [name, parameters] : entry.at("names").items()) {
      const std::string test_case = holders[name] == 1 ? name : document.substr(0, 3) + " " + name;
      cases[test_case] = parameters.get<std::vector<std::string>>();
    }
  }
  return cases;
}

Complaints without_assertions(const Cases& cases, const AssertionCounts& counts) {
  Complaints complaints;
  for (const auto& [test_case, subcases] : cases) {
    if (!has_assertion(counts, test_case, "")) {
      complaints.push_back(fmt::format("no assertion ran in the test case \"{}\"", test_case));
    }
    for (const std::string& subcase : subcases) {
      if (has_assertion(counts, test_case, subcase)) continue;
      complaints.push_back(fmt::format("no assertion ran in the subcase \"{}\" of \"{}\"", subcase, test_case));
    }
  }
  return complaints;
}

}  // namespace tessera::testing
