#include <cstdio>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/tests/ground/source_tree.h"
#include "tessera/tests/harness/skip.h"

namespace {

namespace fs = std::filesystem;

// Formats differ between versions, so only the version that tools/setup installs is checked.
constexpr const char* kProgram = "clang-format-14";

struct Output {
  int status = 0;
  std::string text;
};

Output run(const std::string& command) {
  Output output;
  std::FILE* const pipe = ::popen((command + " 2>&1").c_str(), "r");
  char buffer[4096];
  while (std::fgets(buffer, sizeof buffer, pipe) != nullptr) output.text += buffer;
  output.status = ::pclose(pipe);
  return output;
}

}  // namespace

TEST_CASE("format: every source file is as clang-format writes it; tools/format does it") {
  if (run(std::string(kProgram) + " --version").status != 0) {
    TESSERA_SKIP_MISSING(std::string(kProgram) + " is not installed; tools/setup installs it");
  }
  const fs::path root = tessera::testing::source_root();
  const std::vector<fs::path> files = tessera::testing::files_below(root, {".h", ".cpp"});
  CHECK(files.size() > 10);
  std::string command = "cd '" + root.string() + "' && " + kProgram + " --dry-run --ferror-limit=1";
  for (const fs::path& file : files) command += " '" + file.string() + "'";

  std::set<std::string> unformatted;
  const Output output = run(command);
  const std::string& text = output.text;
  CHECK_MESSAGE(output.status == 0, text);
  for (std::size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const std::string line = text.substr(begin, end - begin);
    if (line.find(": warning:") != std::string::npos) unformatted.insert(line.substr(0, line.find(':')));
  }
  for (const std::string& file : unformatted) FAIL_CHECK(file << " is not formatted; run tools/format");
}
