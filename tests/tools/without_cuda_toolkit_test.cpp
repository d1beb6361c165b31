// Runs commands under tools/without_cuda_toolkit, with folders that stand for a toolkit's.

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include <doctest/doctest.h>

#include "tessera/tests/harness/shell.h"
#include "tessera/tests/harness/skip.h"
#include "tessera/tools/launcher/private_folder.h"

namespace {

using tessera::testing::shell;
using tessera::testing::ShellOutcome;

bool can_hide(const std::string& folder) {
  return ::geteuid() == 0 && shell("unshare --mount mount -t tmpfs none '" + folder + "'").exit_code == 0;
}

// Runs a command without CUDA where CUDA_HOME is `home`, and returns what it has written.
std::string output_without(const std::string& home, const std::string& command) {
  const ShellOutcome outcome = shell("CUDA_HOME='" + home + "' tools/without_cuda_toolkit " + command);
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 0);
  return outcome.output;
}

}  // namespace

TEST_CASE(
    "without_cuda_toolkit: the folder of CUDA_HOME is empty for the command, which gets its arguments as they are") {
  const tessera::PrivateFolder folder;
  if (!can_hide(folder.path())) TESSERA_SKIP("only root can hide folders, in a mount namespace of its own");
  const std::string toolkit = folder.path() + "/a tool kit";
  std::filesystem::create_directories(toolkit);
  std::ofstream(toolkit + "/nvcc") << "x";
  CHECK(output_without(toolkit, "ls '" + toolkit + "'").empty());
  CHECK(output_without(toolkit, R"(sh -c 'echo "[$1] ${CUDA_HOME-unset}"' sh 'a  b')") == "[a  b] unset\n");
  CHECK(std::filesystem::exists(toolkit + "/nvcc"));
}

TEST_CASE("without_cuda_toolkit: a system's folder that CUDA_HOME names is not hidden") {
  const tessera::PrivateFolder folder;
  if (!can_hide(folder.path())) TESSERA_SKIP("only root can hide folders, in a mount namespace of its own");
  for (const char* home : {"/", "/usr", "/usr/"}) CHECK(output_without(home, "ls /usr/bin/env") == "/usr/bin/env\n");
}
