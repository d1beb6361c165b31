// Asks the scripts of tools/ and the launcher for help, and gives scripts wrong arguments. A script answers at once: it
// installs and builds nothing before.

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/tests/ground/source_tree.h"
#include "tessera/tests/harness/shell.h"
#include "tessera/tests/harness/text.h"
#include "tessera/tools/launcher/private_folder.h"

namespace {

namespace fs = std::filesystem;
using tessera::PrivateFolder;
using tessera::testing::contains;
using tessera::testing::shell;
using tessera::testing::ShellOutcome;

// Holds programs that stand for those that set up and build, and notes whether one of them was called.
class NoBuild {
 public:
  NoBuild() {
    for (const char* program : {"bazel", "apt-get", "sudo", "python3", "pip"}) {
      const std::string path = folder_.path() + "/" + program;
      std::ofstream(path) << "#!/bin/sh\necho " << program << " >>'" << called() << "'\nexit 1\n";
      fs::permissions(path, fs::perms::owner_all);
    }
  }

  // Runs a script of tools/ for at most five seconds.
  ShellOutcome run(const std::string& tool, const std::string& arguments) const {
    return shell("PATH='" + folder_.path() + "':\"$PATH\" timeout 5 '" +
                 (tessera::testing::source_root() / "tools" / tool).string() + "' " + arguments);
  }
  bool is_called() const { return fs::exists(called()); }

 private:
  std::string called() const { return folder_.path() + "/called"; }

  const PrivateFolder folder_;
};

}  // namespace

TEST_CASE("tools: --help answers at once and names the script's own options") {
  struct Row {
    const char* tool;
    std::vector<std::string> options;
  };
  const std::vector<Row> rows = {
      {"demo", {"--ranks", "--backend", "--text", "--help-all"}},
      {"train",
       {"--mesh", "--run", "--config", "--data", "--resume", "--backend", "--restarts", "--time-limit", "--help-all"}},
      {"generate", {"RUN", "--prompt", "--ranks", "--backend", "--help-all"}},
      {"install", {"PREFIX"}},
      {"setup", {"--full", "--docs", "--cuda", "--path", "--full-path", "--docs-path", "--cuda-path", "--weights"}},
      {"bench", {"NAME"}},
      {"docs", {"FOLDER"}},
      {"test", {"--full"}},
  };
  const NoBuild no_build;
  for (const Row& row : rows) {
    for (const char* argument : {"--help", "-h"}) {
      CAPTURE(row.tool);
      CAPTURE(argument);
      const ShellOutcome outcome = no_build.run(row.tool, argument);
      CAPTURE(outcome.output);
      CHECK(outcome.exit_code == 0);
      CHECK(contains(outcome.output, std::string("tools/") + row.tool + " "));
      for (const std::string& option : row.options) CHECK(contains(outcome.output, option));
      // The help ends where the script's first comment does.
      CHECK_FALSE(contains(outcome.output, "set -"));
    }
  }
  CHECK_FALSE(no_build.is_called());
}

TEST_CASE("tools: --help may stand behind other arguments, where these are not a program's") {
  const NoBuild no_build;
  for (const char* tool : {"demo", "train", "generate"}) {
    CAPTURE(tool);
    CHECK(contains(no_build.run(tool, "--backend mpi --help").output, std::string("tools/") + tool + " --help-all"));
  }
  CHECK(contains(no_build.run("install", "/nowhere --help").output, "tools/install PREFIX"));
  CHECK_FALSE(no_build.is_called());
}

TEST_CASE("tools/fuzz: a name that is no reader's is answered with those that are, before anything is made") {
  const NoBuild no_build;
  for (const char* arguments : {"nope", "state_manifest nope", "'param_groups read_box' --keep"}) {
    CAPTURE(arguments);
    const ShellOutcome outcome = no_build.run("fuzz", arguments);
    CAPTURE(outcome.output);
    CHECK(outcome.exit_code == 2);
    CHECK(contains(outcome.output, "' is no reader; name one of: checked_manifest "));
    CHECK(contains(outcome.output, " state_manifest\n"));
  }
  CHECK_FALSE(no_build.is_called());
  CHECK_FALSE(fs::exists(tessera::testing::source_root() / ".fuzz/nope"));
}

TEST_CASE("tools/gpu collect: a folder in which nothing was built is refused, and no other one is made") {
  const NoBuild no_build;
  const PrivateFolder folder;
  const ShellOutcome outcome =
      no_build.run("gpu", "collect " + folder.path() + "/wrong " + folder.path() + "/collected");
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 1);
  CHECK(contains(outcome.output, "/wrong' has no program tests/gpu/gpu_test; name the folder of what was built"));
  CHECK_FALSE(fs::exists(folder.path() + "/collected"));
}

TEST_CASE("tools/install: what it says to CMake can be copied where the prefix has a blank in its name") {
  const PrivateFolder folder;
  const std::string tools = folder.path() + "/tools", prefix = folder.path() + "/a prefix";
  fs::create_directories(tools + "/packaging");
  for (const char* name : {"install", "lib.sh"}) {
    fs::copy_file(tessera::testing::source_root() / "tools" / name, tools + "/" + name);
  }
  // Nothing is installed.
  REQUIRE(shell("tar -cf " + tools + "/packaging/tree.tar -T /dev/null").exit_code == 0);
  std::ofstream(tools + "/setup") << "#!/bin/sh\n";
  std::ofstream(folder.path() + "/bazel") << "#!/bin/sh\nif [ $1 = info ]; then echo " << folder.path() << "; fi\n";
  for (const std::string& path : {tools + "/setup", folder.path() + "/bazel"}) {
    fs::permissions(path, fs::perms::owner_all);
  }
  const ShellOutcome outcome = shell("PATH=" + folder.path() + ":\"$PATH\" '" + tools + "/install' '" + prefix + "'");
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 0);
  const std::size_t at = outcome.output.find(" -DCMAKE_PREFIX_PATH=");
  REQUIRE(at != std::string::npos);
  CHECK(shell("printf '%s' " + outcome.output.substr(at)).output == "-DCMAKE_PREFIX_PATH=" + prefix);
}

TEST_CASE("launch --help: it calls itself as the user does") {
  const PrivateFolder folder;
  const std::string installed = folder.path() + "/tessera-launch", kept = folder.path() + "/launch-0123456789abcdef";
  for (const std::string& copy : {installed, kept}) fs::copy_file(fs::canonical("tools/launcher/launch"), copy);
  const ShellOutcome help = shell("'" + installed + "' --help");
  CAPTURE(help.output);
  CHECK(help.exit_code == 0);
  CHECK(contains(help.output, "tessera-launch -n 4 PROGRAM ARGS"));
  CHECK_FALSE(contains(help.output, "tools/launch"));
  CHECK(contains(shell("'" + installed + "' -n 2").output, "for example: tessera-launch -n 4 PROGRAM ARGS"));
  // This is what the script tools/launch runs.
  CHECK(contains(shell("'" + kept + "' --help").output, "tools/launch -n 4 PROGRAM ARGS"));
}
