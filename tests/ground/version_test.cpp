// Checks that what states Tessera's version states the same one.

#include <fstream>
#include <iterator>
#include <regex>
#include <string>

#include <doctest/doctest.h>
#include <torch/headeronly/version.h>

#include "tessera/tests/ground/source_tree.h"
#include "tessera/version.h"

namespace {

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

TEST_CASE("version: the header, the library and the newest heading of CHANGELOG.md agree") {
  CHECK(std::string(tessera::library_version()) == tessera::kVersion);
  CHECK(std::string(tessera::libtorch_version()) == TORCH_VERSION);
  const std::string changes = read_file(tessera::testing::source_root() / "CHANGELOG.md");
  std::smatch newest;
  REQUIRE(std::regex_search(changes, newest, std::regex("\n## ([^ ,\n]+)")));
  CHECK(newest[1].str() == tessera::kVersion);
}
