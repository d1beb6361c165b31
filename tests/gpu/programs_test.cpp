// Tests on any machine that what `tools/gpu pack` collects starts, and is small enough to travel.

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/tests/harness/shell.h"

namespace {

namespace fs = std::filesystem;
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

TEST_CASE("they are collected with their libraries in 40 MiB, and run from there into one table") {
  const std::string folder = std::string(std::getenv("TEST_TMPDIR")) + "/pack";
  const ShellOutcome collected = shell("tools/gpu collect . " + folder + " 2>&1");
  CAPTURE(collected.output);
  REQUIRE(collected.exit_code == 0);
  CHECK(collected.output.find(" pieces of tests, ") != std::string::npos);
  CHECK(std::filesystem::file_size(folder + ".tgz") <= std::uintmax_t{40} << 20);

  const ShellOutcome found =
      shell("dirname $(dirname $(ldd tests/gpu/gpu_test | awk '/libtorch_cpu.so/ { print $3 }'))");
  const std::string libtorch = found.output.substr(0, found.output.find('\n'));
  for (const fs::directory_entry& program : fs::directory_iterator(folder + "/bin")) {
    CAPTURE(program.path().string());
    const ShellOutcome libraries =
        shell("LD_LIBRARY_PATH=" + libtorch + "/lib:" + folder + "/lib ldd " + program.path().string());
    CHECK(libraries.exit_code == 0);
    CHECK(libraries.output.find("not found") == std::string::npos);
  }

  const auto table = [&] {
    return shell("LIBTORCH=" + libtorch + " TESSERA_TEST_DEVICE=cpu TESSERA_GPU_PIECES='tests/gpu/files_cases.cpp' " +
                 folder + "/gpu run " + folder + " 2>&1");
  };
  for (int run = 0; run < 2; ++run) {  // the second finds the result of the first
    CAPTURE(run);
    const ShellOutcome outcome = table();
    CAPTURE(outcome.output);
    CHECK(outcome.exit_code == 0);
    CHECK(outcome.output.find("threads.tests.gpu.files_cases.cpp") != std::string::npos);
    CHECK(outcome.output.find("[tessera] 2 passed, 0 failed") != std::string::npos);
    CHECK(outcome.output.find("ZeRO-3 in a graph: not run: needs 2 GPUs") != std::string::npos);
  }
}

TEST_CASE("tools/gpu says how it is called, and where it needs a folder") {
  const ShellOutcome usage = shell("tools/gpu");
  CHECK(usage.exit_code == 2);
  CHECK(usage.output.find("tools/gpu run FOLDER") != std::string::npos);
  CHECK(shell("tools/gpu run").output.find("run needs the packed folder") != std::string::npos);
}
