// Looks at the headers that tools/install installs.

#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/tests/ground/source_tree.h"
#include "tessera/tests/harness/shell.h"
#include "tessera/tools/launcher/private_folder.h"

namespace {

namespace fs = std::filesystem;

// Returns the headers that are included in angle brackets, or in quotes.
std::vector<std::string> included(const fs::path& header, const char* pattern) {
  std::ifstream in(header);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  const std::regex include(pattern);
  std::vector<std::string> found;
  for (std::sregex_iterator it(text.begin(), text.end(), include), end; it != end; ++it) found.push_back((*it)[1]);
  return found;
}

// Returns the members without a value of their own of the aggregates in `text` whose names end with Options.
std::vector<std::string> members_without_value(const std::string& text) {
  std::vector<std::string> found;
  std::string options;  // the struct that the line is in
  bool continues = false;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::smatch match;
    if (std::regex_match(line, match, std::regex("struct (\\w*Options) \\{"))) options = match[1];
    if (line == "};" || line.starts_with("  " + options + "("))
      options.clear();  // with a constructor it is no aggregate
    line = line.substr(0, line.find("//"));
    const bool declares = !options.empty() && line.starts_with("  ") && line.find(';') != std::string::npos;
    const bool is_function = std::regex_search(line, std::regex("^  [^<]*\\(|\\) const;"));
    if (declares && !continues && !is_function && line.find('=') == std::string::npos) found.push_back(options + line);
    continues = !options.empty() && line.starts_with("  ") && line.find(';') == std::string::npos;
  }
  return found;
}

}  // namespace

TEST_CASE("install: a caller may leave out any member of options without a warning of GCC") {
  CHECK(members_without_value("struct AOptions {\n  int a;  // one\n  int b = 0;\n};\nint c;\n") ==
        std::vector<std::string>{"AOptions  int a;  "});
  CHECK(members_without_value("struct AOptions {\n  AOptions();\n  int a;\n};\n").empty());
  const tessera::PrivateFolder folder;
  REQUIRE(tessera::testing::shell("tar -xf tools/packaging/headers.tar -C '" + folder.path() + "'").exit_code == 0);
  for (const fs::path& header : tessera::testing::files_below(folder.path(), {".h"})) {
    std::ifstream in(fs::path(folder.path()) / header);
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    CAPTURE(header.string());
    CHECK(members_without_value(text) == std::vector<std::string>());
  }
}

TEST_CASE("install: headers include LibTorch, the standard library and each other, and nothing that is missing") {
  const tessera::PrivateFolder folder;
  REQUIRE(tessera::testing::shell("tar -xf tools/packaging/headers.tar -C '" + folder.path() + "'").exit_code == 0);
  const fs::path include = fs::path(folder.path()) / "include";
  const std::set<std::string> others = {"ATen", "c10", "torch"};
  int headers = 0;
  for (const fs::path& header : tessera::testing::files_below(include, {".h"})) {
    ++headers;
    for (const std::string& name : included(include / header, "#include \"([^\"]+)\"")) {
      const std::string message = header.string() + " includes " + name + ", which is not installed";
      CHECK_MESSAGE(fs::exists(include / name), message);
    }
    const bool is_harness = header.string().find("tests/harness/") != std::string::npos;
    for (const std::string& name : included(include / header, "#include <([^>]+/[^>]+)>")) {
      const std::string owner = name.substr(0, name.find('/'));
      const std::string message = header.string() + " includes " + name;
      CHECK_MESSAGE((others.contains(owner) || owner == "sys" || (is_harness && owner == "doctest")), message);
    }
  }
  CHECK(headers > 100);
}
