// Builds and runs the projects of docs/install.md as its readers would, with its own commands, against an installation
// that was moved, where neither the source tree nor Bazel's outputs can be seen.

#include <string>

#include <doctest/doctest.h>
#include <torch/headeronly/version.h>

#include "tessera/tests/consumers/installation.h"

namespace {

namespace fs = std::filesystem;
using tessera::testing::Installation;
using tessera::testing::page_commands;
using tessera::testing::ShellOutcome;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

void replace_in(const fs::path& file, const std::string& from, const std::string& to) {
  std::string text = tessera::testing::read_text(file);
  const std::size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  tessera::testing::write_text(file, text.replace(at, from.size(), to));
}

}  // namespace

TEST_CASE("consumers: every block of commands on the page is one that a case of this file runs") {
  const std::string page = tessera::testing::read_text("docs/install.md");
  std::size_t blocks = 0;
  for (std::size_t at = 0; (at = page.find("```sh\n", at)) != std::string::npos; ++at) ++blocks;
  CHECK(blocks == 4);
  CHECK(page_commands("tools/install") == "tools/install ~/tessera\n");
  for (const char* part : {"build/first", "ctest --test-dir", "make train"}) CHECK(!page_commands(part).empty());
}

TEST_CASE("consumers: a CMake project builds, and runs on four ranks") {
  const Installation installation;
  const fs::path project = installation.project("cmake");
  const ShellOutcome outcome = installation.run(project, page_commands("build/first"));
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 0);
  CHECK(contains(outcome.output, "DTensor Float [10, 2] on {tp: 4} on cpu as [S(0)], here [3, 2]"));
  CHECK(contains(outcome.output, "\n2470\n"));

  const std::string again = installation.home().string() + "/again/bin/tessera-launch --no-prefix -n 4 build/first";
  const ShellOutcome without = installation.run(project, "mv ~/tessera ~/again\n" + again);
  CAPTURE(without.output);
  CHECK(without.exit_code != 0);
  const ShellOutcome with = installation.run(project, "LD_LIBRARY_PATH=~/again/lib " + again);
  CAPTURE(with.output);
  CHECK(with.exit_code == 0);
  CHECK(contains(with.output, "\n2470\n"));
}

TEST_CASE("consumers: a CMake project tests with the harness on 1, 2 and 4 ranks, and a wrong sum fails") {
  const Installation installation;
  const fs::path project = installation.project("ctest");
  const ShellOutcome right = installation.run(project, page_commands("ctest --test-dir") + "build/sum_test\n");
  CAPTURE(right.output);
  CHECK(right.exit_code == 0);
  CHECK(contains(right.output, "sum_test"));
  CHECK(contains(right.output, "sum_test_mpi"));
  CHECK(contains(right.output, "sum_test_threads"));
  CHECK(contains(right.output, "100% tests passed, 0 tests failed out of 3"));
  CHECK(contains(right.output, "[tessera] 1 passed, 0 failed, 0 skipped"));

  replace_in(project / "sum_test.cpp", "Approx(3.0", "Approx(3.5");
  const ShellOutcome wrong = installation.run(project, page_commands("ctest --test-dir"));
  CAPTURE(wrong.output);
  CHECK(wrong.exit_code != 0);
  CHECK(contains(wrong.output, "on 2 ranks: rank "));
  CHECK(contains(wrong.output, "on 2 ranks, which are threads: "));
  CHECK(contains(wrong.output, "0% tests passed, 3 tests failed out of 3"));
}

TEST_CASE("consumers: a test all of whose cases are skipped counts as skipped in ctest, and one without cases fails") {
  const Installation installation;
  const fs::path project = installation.project("ctest");
  tessera::testing::write_text(project / "sum_test.cpp",
                               "#include \"tessera/tests/harness/ranks.h\"\n"
                               "TESSERA_RANKS_TEST_CASE(\"a case\", {2}) { TESSERA_SKIP(\"not here\"); }\n");
  replace_in(project / "CMakeLists.txt", " BACKENDS gloo mpi threads", "");
  const ShellOutcome outcome = installation.run(project, page_commands("ctest --test-dir"));
  CAPTURE(outcome.output);
  CHECK(contains(outcome.output, "sum_test (Skipped)"));

  tessera::testing::write_text(project / "sum_test.cpp", "");
  const ShellOutcome without_cases = installation.run(project, page_commands("ctest --test-dir"));
  CAPTURE(without_cases.output);
  CHECK(without_cases.exit_code != 0);
  CHECK(contains(without_cases.output, "0% tests passed, 1 tests failed out of 1"));
}

TEST_CASE("consumers: a project with make and pkg-config trains on four ranks") {
  const Installation installation;
  const fs::path project = installation.project("make");
  const ShellOutcome outcome = installation.run(project, page_commands("make train"));
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 0);
  CHECK(contains(outcome.output, "four ranks and one process agree"));

  // A library that stands for another LibTorch: its version is all that the check sees.
  tessera::testing::write_text(
      project / "other.c",
      "unsigned long aoti_torch_abi_version(void) { return 2UL << 56 | 12UL << 48 | 1UL << 40; }\n");
  const ShellOutcome other =
      installation.run(project, "cc -shared -fPIC other.c -o other.so\nLD_PRELOAD=./other.so ./train\n");
  CAPTURE(other.output);
  CHECK(other.exit_code != 0);
  CHECK(contains(other.output, "libtessera was built with LibTorch " TORCH_VERSION ", but LibTorch 2.12.1 is loaded"));

  // A LibTorch that lacks a function is another version too: libtessera.so gets to say so.
  const std::string in_library = "LC_ALL=C sed -i s/_ZN2at4_ops10_make_dual4call/_ZN2at4_ops10_make_dual4gone/ ";
  const ShellOutcome without =
      installation.run(project, in_library + "~/tessera/lib/libtessera.so.*.*.*\nLD_PRELOAD=./other.so ./train\n");
  CAPTURE(without.output);
  CHECK(contains(without.output, ", but LibTorch 2.12.1 is loaded"));
  const ShellOutcome older = installation.run(
      project,
      "LC_ALL=C sed -i s/aoti_torch_abi_version/aoti_torch_abi_is_gone/ ~/tessera/lib/libtessera.so.*.*.*\n./train\n");
  CAPTURE(older.output);
  CHECK(older.exit_code != 0);
  CHECK(
      contains(older.output, "libtessera was built with LibTorch " TORCH_VERSION ", but an older LibTorch is loaded"));
}
