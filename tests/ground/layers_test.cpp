#include <filesystem>
#include <fstream>
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

// The folders of the library, lowest first: a folder uses those above it in this list, and itself. The longest match counts,
// so that dtensor/io lies above the rest of dtensor.
const std::vector<std::string> kLayers = {
    "mesh", "placement", "ops/rules", "dtensor", "dtensor/io", "ops/kernels", "styles", "styles/layers",
};

std::optional<std::size_t> layer_of(const std::string& folder) {
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < kLayers.size(); ++i) {
    const bool inside = folder == kLayers[i] || folder.starts_with(kLayers[i] + "/");
    if (inside && (!best || kLayers[i].size() > kLayers[*best].size())) best = i;
  }
  return best;
}

// Whether `from`, a folder of the library, must not use `to`: a higher layer, or a folder that is no part of the library.
bool is_forbidden(const std::string& from, const std::string& to) {
  const std::optional<std::size_t> user = layer_of(from);
  if (!user) return false;
  const std::optional<std::size_t> used = layer_of(to);
  return !used || *used > *user;
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

// The folders whose headers a source file includes.
std::set<std::string> folders_included(const std::string& source) {
  return matches(source, std::regex("#include \"tessera/([^\"]*)/[^\"/]*\""));
}

std::string read_file(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

TEST_CASE("layers: what a BUILD file names is found") {
  const std::string build = R"(
    load("//tools:build_defs.bzl", "tessera_library")
    tessera_library(
        name = "x",  # as "//commented" out
        visibility = ["//styles:__pkg__", "//visibility:public"],
        deps = [":y", "//mesh", "//ops/rules:search", "@tessera//placement:plan", "@fmt"],
    ))";
  CHECK(packages_named(build) == std::set<std::string>{"mesh", "ops/rules", "placement"});
  CHECK(
      folders_included("#include \"tessera/mesh/mesh.h\"\n#include \"tessera/dtensor/io/weights.h\"\n#include <vector>\n") ==
      std::set<std::string>{"mesh", "dtensor/io"});
}

TEST_CASE("layers: an edge upward is forbidden, one downward or within a folder is not") {
  struct Row {
    const char* from;
    const char* to;
    bool forbidden;
  };
  const std::vector<Row> rows = {
      {"placement", "mesh", false},         {"mesh", "placement", true},        {"dtensor", "ops/rules", false},
      {"ops/rules", "dtensor", true},       {"dtensor", "ops/kernels", true},   {"ops/kernels", "dtensor", false},
      {"dtensor/random", "dtensor", false}, {"dtensor", "dtensor/io", true},    {"dtensor/io", "dtensor", false},
      {"dtensor", "styles", true},          {"styles", "ops/kernels", false},   {"styles/layers", "styles", false},
      {"mesh", "tests/harness", true},      {"mesh", "tools/launcher", true},   {"tests/mesh", "styles", false},
      {"examples/embed", "styles", false},  {"styles", "examples/embed", true},
  };
  for (const Row& row : rows) {
    CAPTURE(row.from);
    CAPTURE(row.to);
    CHECK(is_forbidden(row.from, row.to) == row.forbidden);
  }
}

TEST_CASE("layers: no BUILD file and no source file uses a folder above its own") {
  const fs::path root = tessera::testing::source_root();
  int library_files = 0;
  for (const fs::path& file : tessera::testing::files_below(root, {"BUILD.bazel", "BUILD", ".h", ".cpp"})) {
    const std::string folder = file.parent_path().generic_string();
    if (!layer_of(folder)) continue;
    ++library_files;
    const std::string text = read_file(root / file);
    const bool is_build = file.extension() != ".h" && file.extension() != ".cpp";
    for (const std::string& used : is_build ? packages_named(text) : folders_included(text)) {
      const std::string message = file.string() + " uses //" + used + ", which lies above " + folder;
      CHECK_MESSAGE(!is_forbidden(folder, used), message);
    }
  }
  CHECK(library_files > 0);
}
