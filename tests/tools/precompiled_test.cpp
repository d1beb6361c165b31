// Checks that a precompiled header is compiled again, and its users with it, when a header of LibTorch changes.

#include <pwd.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include <doctest/doctest.h>

#include "tessera/tests/ground/source_tree.h"
#include "tessera/tests/harness/shell.h"
#include "tessera/tools/launcher/private_folder.h"

using tessera::PrivateFolder;
using tessera::testing::shell;
using tessera::testing::ShellOutcome;
using tessera::testing::source_root;
namespace fs = std::filesystem;

namespace {

// Runs a command in the source tree. A test's HOME is not the user's, which Bazel needs.
ShellOutcome in_source_tree(const std::string& command) {
  const std::string home = ::getpwuid(::getuid())->pw_dir;
  return shell("cd '" + source_root().string() + "' && HOME='" + home + "' " + command);
}

// Lets a folder be removed in which Bazel has outputs, which are without write permission.
class Writable {
 public:
  explicit Writable(const std::string& folder) : folder_(folder) {}
  ~Writable() { shell("chmod -R u+w '" + folder_ + "'"); }
  Writable(const Writable&) = delete;
  Writable& operator=(const Writable&) = delete;

 private:
  const std::string folder_;
};

// Makes a LibTorch that consists of links to this build's, but for a copy of c10's headers.
fs::path make_libtorch(const fs::path& below) {
  const fs::path version = fs::canonical("external/libtorch/include/torch/headeronly/version.h");
  const fs::path installed = version.parent_path().parent_path().parent_path().parent_path(), made = below / "libtorch";
  fs::create_directories(made / "include");
  fs::create_directory_symlink(installed / "lib", made / "lib");
  for (const char* part : {"ATen", "caffe2", "torch"}) {
    fs::create_directory_symlink(installed / "include" / part, made / "include" / part);
  }
  fs::copy(installed / "include/c10", made / "include/c10", fs::copy_options::recursive);
  return made;
}

// Builds the probe as tests and as libraries are compiled, with `libtorch`, by a Bazel of its own, whose outputs are in
// `folder`. `compiler` is an argument of Bazel.
ShellOutcome build_probes(const fs::path& libtorch, const std::string& folder, const std::string& compiler) {
  return in_source_tree("LIBTORCH='" + libtorch.string() + "' timeout 420 bazel --batch --output_user_root='" + folder +
                        "/bazel' build " + compiler +
                        " --keep_going --symlink_prefix=/ --disk_cache= //tests/tools:precompiled_probe " +
                        "//tests/tools:precompiled_library_probe");
}

std::size_t count_in(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++found;
  return found;
}

}  // namespace

TEST_CASE("a changed header of LibTorch reaches sources that begin with a precompiled one") {
  struct {
    const char* compiler;
    const char* error;
  } const rows[] = {{"--repo_env=CC=clang-14", "error: the probe"}, {"--config=gcc", "error: #error the probe"}};
  for (const auto& row : rows) {
    CAPTURE(row.compiler);
    const PrivateFolder folder;
    const Writable outputs(folder.path());
    const fs::path libtorch = make_libtorch(folder.path());
    const ShellOutcome before = build_probes(libtorch, folder.path(), row.compiler);
    INFO(before.output);
    REQUIRE(before.exit_code == 0);
    std::ofstream(libtorch / "include/c10/core/Device.h", std::ios::app) << "\n#define TESSERA_PROBE_CHANGED\n";
    const ShellOutcome after = build_probes(libtorch, folder.path(), row.compiler);
    INFO(after.output);
    CHECK(after.exit_code != 0);
    CHECK(count_in(after.output, row.error) == 2);
  }
}
