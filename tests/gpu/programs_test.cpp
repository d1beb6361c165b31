// Tests on any machine that what `tools/gpu pack` collects starts, and is small enough to travel.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/tests/harness/shell.h"

namespace {

using tessera::testing::shell;
using tessera::testing::ShellOutcome;

const std::vector<std::string> kPrograms = {
    "tests/gpu/gpu_test", "tests/operators/report", "bench/gpu",
    "bench/dispatch",     "examples/train/train",   "examples/generate/generate"};

}  // namespace

TEST_CASE("the programs for a machine with a GPU find their libraries and start") {
  for (const std::string& program : kPrograms) {
    CAPTURE(program);
    const ShellOutcome libraries = shell("ldd " + program);
    CHECK(libraries.exit_code == 0);
    CHECK(libraries.output.find("libtorch_cuda.so") != std::string::npos);
    CHECK(libraries.output.find("not found") == std::string::npos);
    // report has no options: it surveys the operators whose names contain its argument.
    const bool is_report = program == "tests/operators/report";
    const ShellOutcome started = shell("./" + program + (is_report ? " aten::add.Tensor 2>&1" : " --help 2>&1"));
    CAPTURE(started.output);
    CHECK(started.exit_code == 0);
    if (is_report) CHECK(started.output.find("right by rule\tright\taten::add.Tensor") != std::string::npos);
  }
}

TEST_CASE("they are at most 40 MiB together") {
  std::uintmax_t bytes = 0;
  for (const std::string& program : kPrograms) {
    CAPTURE(program);
    CHECK(shell("strip -o stripped " + program).exit_code == 0);
    bytes += std::filesystem::file_size("stripped");
  }
  CHECK(bytes <= std::uintmax_t{40} << 20);
}

TEST_CASE("tools/gpu says how it is called, and where it needs a folder") {
  const ShellOutcome usage = shell("tools/gpu");
  CHECK(usage.exit_code == 2);
  CHECK(usage.output.find("tools/gpu run FOLDER") != std::string::npos);
  CHECK(shell("tools/gpu run").output.find("run needs the packed folder") != std::string::npos);
}
