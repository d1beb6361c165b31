// Checks that host_access.txt lists every place of the library where the host may touch the memory of a tensor: on a
// GPU such a place waits for it, or must not be reached.

#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <string>

#include <doctest/doctest.h>

#include "tessera/tests/ground/source_tree.h"

namespace {

namespace fs = std::filesystem;

constexpr std::array kFolders = {"mesh", "dtensor", "ops", "placement", "styles", "layers", "inspect", "gpu_kernels"};

struct Listed {
  int lines = 0;
  std::string reason;
};

// Reads lines "FILE: LINES: REASON"; '#' starts a comment.
std::map<std::string, Listed> read_list(const fs::path& path) {
  std::map<std::string, Listed> out;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line.front() == '#') continue;
    std::smatch parts;
    REQUIRE(std::regex_match(line, parts, std::regex("([^:]+): ([0-9]+): (.{5,})")));
    out[parts[1]] = {.lines = std::stoi(parts[2]), .reason = parts[3]};
  }
  return out;
}

int lines_of(const fs::path& path) {
  static const std::regex kAccess(
      R"(\.item<|\.item\(\)|\.cpu\(\)|data_ptr|memcpy|device\(at::kCPU\)|\.nonzero\(|at::_unique\(|accessor<)"
      R"(|at::_local_scalar_dense\(|at::equal\(|synchronizeDevice|values_on_host\(|\.to\((at|c10|torch)::kCPU)"
      R"(|::nonzero\(|[a-z]\.equal\(|is_nonzero\(|masked_select)");
  std::ifstream file(path);
  int out = 0;
  for (std::string line; std::getline(file, line);) out += std::regex_search(line, kAccess) ? 1 : 0;
  return out;
}

}  // namespace

TEST_CASE("host_access.txt lists where the host touches the memory of tensors, with a reason each") {
  const fs::path root = tessera::testing::source_root();
  std::map<std::string, Listed> listed = read_list(root / "tests/ground/host_access.txt");
  for (const char* folder : kFolders) {
    for (const fs::path& file : tessera::testing::files_below(root / folder, {".cpp", ".h"})) {
      const std::string name = (fs::path(folder) / file).string();
      CAPTURE(name);
      const int lines = lines_of(root / name);
      const auto found = listed.find(name);
      CHECK_MESSAGE((found == listed.end() ? 0 : found->second.lines) == lines,
                    "change its line in tests/ground/host_access.txt, and say why a GPU's tensors may come there");
      if (found != listed.end()) listed.erase(found);
    }
  }
  for (const auto& [name, entry] : listed) FAIL_CHECK("host_access.txt lists ", name, ", which is not there");
}
