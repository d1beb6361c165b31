#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <regex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/tests/ground/source_tree.h"

namespace {

namespace fs = std::filesystem;

// All folders of the library, lowest first: a folder may use itself and those before it, so there is no cycle.
const std::vector<std::string> kFolders = {
    "gpu_kernels",
    "mesh/core",
    "mesh/backends",
    "mesh",
    "mesh/collectives",
    "placement",
    "placement/planner",
    "ops/rules",
    "dtensor/core",
    "dtensor/random",
    "dtensor/data",
    "dtensor/redistribute",
    "dtensor/deferred",
    "dtensor",
    "dtensor/dispatch",
    "dtensor/io",
    "inspect",
    "ops/kernels",
    "styles",
    "layers",
};

std::optional<std::size_t> layer_of(const std::string& folder) {
  for (std::size_t i = 0; i < kFolders.size(); ++i) {
    if (folder == kFolders[i]) return i;
  }
  return std::nullopt;
}

// Says whether a file of `folder` belongs to the library, so that kFolders must have its folder.
bool is_library(const std::string& folder) {
  static const std::set<std::string> tops = {"gpu_kernels", "mesh",    "placement", "ops",
                                             "dtensor",     "inspect", "styles",    "layers"};
  return tops.contains(folder.substr(0, folder.find('/')));
}

// Says whether `from`, a folder of the library, must not use `to`: a higher folder, or one that is no part of the
// library.
bool is_forbidden(const std::string& from, const std::string& to) {
  const std::optional<std::size_t> user = layer_of(from);
  const std::optional<std::size_t> used = layer_of(to);
  return !user || !used || *used > *user;
}

std::set<std::string> matches(const std::string& text, const std::regex& pattern) {
  std::set<std::string> found;
  for (auto it = std::sregex_iterator(text.begin(), text.end(), pattern); it != std::sregex_iterator(); ++it) {
    found.insert((*it)[1]);
  }
  return found;
}

// The packages that a BUILD file names outside load statements and visibility.
std::set<std::string> packages_named(const std::string& build) {
  const std::regex comments("#[^\n]*");
  const std::regex loads("load\\([^)]*\\)");
  const std::regex visibilities("\"//(visibility:[a-z]+|[^\"]*:__(pkg|subpackages)__)\"");
  std::string text = std::regex_replace(build, comments, "");
  text = std::regex_replace(text, loads, "");
  text = std::regex_replace(text, visibilities, "");
  return matches(text, std::regex("\"(?:@tessera)?//([^\":]*)"));
}

// The headers of ours that a source file includes: "mesh/mesh.h".
std::set<std::string> headers_included(const std::string& source) {
  return matches(source, std::regex("#include \"tessera/([^\"]*)\""));
}

std::string folder_of(const std::string& path) { return fs::path(path).parent_path().generic_string(); }
std::string stem_of(const std::string& path) { return fs::path(path).replace_extension().generic_string(); }

// Returns the pairs of header and source, by their stems, that include each other's headers. `includes` has the headers
// that each file includes.
std::set<std::pair<std::string, std::string>> mutual_includes(
    const std::map<std::string, std::set<std::string>>& includes) {
  std::set<std::pair<std::string, std::string>> edges;
  for (const auto& [file, headers] : includes) {
    for (const std::string& header : headers) edges.emplace(stem_of(file), stem_of(header));
  }
  std::set<std::pair<std::string, std::string>> found;
  for (const auto& [from, to] : edges) {
    if (from < to && edges.contains({to, from})) found.emplace(from, to);
  }
  return found;
}

std::string read_file(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<fs::path> library_files(const std::vector<std::string>& names) {
  std::vector<fs::path> found;
  for (const fs::path& file : tessera::testing::files_below(tessera::testing::source_root(), names)) {
    if (is_library(file.parent_path().generic_string())) found.push_back(file);
  }
  return found;
}

}  // namespace

TEST_CASE("layers: what a BUILD file and a source file name is found") {
  const std::string build = R"(
    load("//tools:build_defs.bzl", "tessera_library")
    tessera_library(
        name = "x",  # as "//commented" out
        visibility = ["//styles:__pkg__", "//visibility:public"],
        deps = [":y", "//mesh", "//ops/rules:search", "@tessera//placement:plan", "@fmt"],
    ))";
  CHECK(packages_named(build) == std::set<std::string>{"mesh", "ops/rules", "placement"});
  CHECK(headers_included(
            "#include \"tessera/mesh/mesh.h\"\n#include \"tessera/dtensor/io/weights.h\"\n#include <vector>\n") ==
        std::set<std::string>{"mesh/mesh.h", "dtensor/io/weights.h"});
}

TEST_CASE("layers: an edge upward is forbidden, one downward or within a folder is not") {
  struct Row {
    const char* from;
    const char* to;
    bool forbidden;
  };
  const std::vector<Row> rows = {
      {"placement", "mesh", false},
      {"mesh", "placement", true},
      {"mesh", "mesh/backends", false},
      {"mesh/backends", "mesh", true},
      {"mesh/collectives", "mesh", false},
      {"mesh", "mesh/collectives", true},
      {"placement", "placement/planner", true},
      {"dtensor", "dtensor/dispatch", true},
      {"dtensor/dispatch", "dtensor", false},
      {"dtensor", "ops/rules", false},
      {"ops/rules", "dtensor/core", true},
      {"dtensor", "ops/kernels", true},
      {"ops/kernels", "dtensor", false},
      {"styles", "layers", true},
      {"layers", "styles", false},
      {"mesh", "tests/harness", true},
      {"mesh", "tools/launcher", true},
      {"styles", "examples/embed", true},
      {"mesh/new_folder", "mesh", true},
  };
  for (const Row& row : rows) {
    CAPTURE(row.from);
    CAPTURE(row.to);
    CHECK(is_forbidden(row.from, row.to) == row.forbidden);
  }
}

TEST_CASE("layers: two pairs of header and source that include each other are found") {
  const std::set<std::pair<std::string, std::string>> found = mutual_includes({
      {"mesh/a.h", {}},
      {"mesh/a.cpp", {"mesh/a.h", "mesh/b.h"}},
      {"mesh/b.h", {"mesh/a.h"}},
      {"mesh/c.cpp", {"mesh/a.h", "mesh/c.h"}},
  });
  CHECK(found == std::set<std::pair<std::string, std::string>>{{"mesh/a", "mesh/b"}});
}

TEST_CASE("layers: no BUILD file and no source file uses a folder above its own, and every folder is known") {
  int checked = 0;
  for (const fs::path& file : library_files({"BUILD.bazel", "BUILD", ".h", ".cpp"})) {
    const std::string folder = file.parent_path().generic_string();
    const std::string unknown = folder + " has no place in kFolders; add it there and to docs/architecture.md";
    CHECK_MESSAGE(layer_of(folder).has_value(), unknown);
    ++checked;
    const std::string text = read_file(tessera::testing::source_root() / file);
    std::set<std::string> used;
    if (file.extension() != ".h" && file.extension() != ".cpp") {
      used = packages_named(text);
    } else {
      for (const std::string& header : headers_included(text)) used.insert(folder_of(header));
    }
    for (const std::string& to : used) {
      const std::string message = file.string() + " uses //" + to + ", which lies above " + folder;
      CHECK_MESSAGE(!is_forbidden(folder, to), message);
    }
  }
  CHECK(checked > 0);
}

TEST_CASE("layers: no two pairs of header and source include each other") {
  std::map<std::string, std::set<std::string>> includes;
  for (const fs::path& file : library_files({".h", ".cpp"})) {
    includes[file.generic_string()] = headers_included(read_file(tessera::testing::source_root() / file));
  }
  CHECK(!includes.empty());
  for (const auto& [a, b] : mutual_includes(includes)) {
    const std::string message = a + " and " + b + " include each other";
    CHECK_MESSAGE(false, message);
  }
}

TEST_CASE("layers: docs/architecture.md lists every folder of the library, in this order") {
  const std::string page = read_file(tessera::testing::source_root() / "docs/architecture.md");
  std::size_t last = 0;
  for (const std::string& folder : kFolders) {
    CAPTURE(folder);
    const std::size_t at = page.find("| `" + folder + "/` |");
    REQUIRE(at != std::string::npos);
    CHECK(at > last);
    last = at;
  }
}
