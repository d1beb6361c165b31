// Checks that tests/accelerator/mutations.txt lists every line of the library by which streams or ranks wait, so that
// tests/accelerator/try_mutations tries to remove each of them.

#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <utility>

#include <doctest/doctest.h>

#include "tessera/tests/ground/source_tree.h"

namespace {

namespace fs = std::filesystem;

constexpr std::array kFolders = {"mesh", "dtensor", "ops", "placement", "styles", "layers", "inspect", "gpu_kernels"};
constexpr const char* kStreamPoint = "mesh/core/stream_point.cpp";

// Maps a file and a line to how often it stands there.
using Lines = std::map<std::pair<std::string, std::string>, int>;

std::string text_of(const fs::path& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

bool waits(const std::string& line) {
  static const std::regex kDefinition(R"(^StreamPoint StreamPoint::here|^explicit StreamOfPoint)");
  static const std::regex kWait(
      R"(StreamPoint::here\(|event\.(record|block|synchronize)\(|recordDataPtrOnStream\(|)"
      R"(synchronize(Device|Stream|Event)\(|point\.finish\(|)"
      R"((\.|->)wait\(\)|(joined\S*|begun|queued_|made)\.keep\(|StreamOfPoint \w+\(|keep_memory\(\);|keep\(round|)"
      R"(moved = moved|set_multithreading_enabled\(|\.setDevice\()");
  return std::regex_search(line, kWait) && !std::regex_search(line, kDefinition);
}

std::string trimmed(const std::string& line) {
  const std::size_t first = line.find_first_not_of(' ');
  return first == std::string::npos ? "" : line.substr(first);
}

Lines lines_of_library(const fs::path& root) {
  Lines out;
  for (const char* folder : kFolders) {
    for (const fs::path& file : tessera::testing::files_below(root / folder, {".cpp", ".h", ".cu"})) {
      const std::string name = (fs::path(folder) / file).string();
      std::istringstream text(text_of(root / name));
      for (std::string line; std::getline(text, line);) {
        const std::string code = trimmed(line);
        if (code.rfind("//", 0) != 0 && waits(code)) ++out[{name, code}];
      }
    }
  }
  return out;
}

// Returns the lines that the list has, and checks that each has a case that is there, or a reason.
Lines lines_of_list(const fs::path& root) {
  std::string cases;
  for (const fs::path& file : tessera::testing::files_below(root / "tests/accelerator", {"_test.cpp"})) {
    cases += text_of(root / "tests/accelerator" / file);
  }
  Lines out;
  std::string file, code;
  std::istringstream list(text_of(root / "tests/accelerator/mutations.txt"));
  for (std::string line; std::getline(list, line);) {
    CAPTURE(line);
    if (line.rfind("file: ", 0) == 0) file = line.substr(6);
    if (line.rfind("line: ", 0) == 0) code = line.substr(6);
    if (line.rfind("case: ", 0) == 0) CHECK(cases.find('"' + line.substr(6) + '"') != std::string::npos);
    if (line.rfind("stays: ", 0) == 0) CHECK(line.size() > 15);
    if (line.rfind("case: ", 0) == 0 || line.rfind("stays: ", 0) == 0) ++out[{file, code}];
  }
  return out;
}

}  // namespace

TEST_CASE("mutations.txt lists every line by which streams or ranks wait") {
  const fs::path root = tessera::testing::source_root();
  Lines listed = lines_of_list(root);
  for (const auto& [line, count] : lines_of_library(root)) {
    const std::string where = line.first + ": " + line.second;
    CAPTURE(where);
    CHECK_MESSAGE(listed[line] == count, "list it in tests/accelerator/mutations.txt, with a test case that needs it");
    listed.erase(line);
  }
  for (const auto& [line, count] : listed) FAIL_CHECK("mutations.txt lists, for ", line.first, ": ", line.second);
}

TEST_CASE("events are in one source alone") {
  const fs::path root = tessera::testing::source_root();
  const std::regex event(R"(c10::Event\b|cudaEvent|cudaStreamWait)");
  for (const char* folder : kFolders) {
    for (const fs::path& file : tessera::testing::files_below(root / folder, {".cpp", ".h", ".cu"})) {
      const std::string name = (fs::path(folder) / file).string();
      CAPTURE(name);
      CHECK(std::regex_search(text_of(root / name), event) == (name == kStreamPoint));
    }
  }
}
