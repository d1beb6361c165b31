#include "tessera/tests/consumers/installation.h"

#include <stdlib.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <stdexcept>

#include "tessera/tests/docs/pages.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTree = "tools/packaging/tree.tar";

// Returns a folder that is not in Bazel's folder for tests, which will be hidden.
PrivateFolder outside_of_bazel() {
  ::unsetenv("TEST_TMPDIR");
  return {};
}

void must(const std::string& command) {
  const ShellOutcome outcome = shell(command);
  if (outcome.exit_code != 0) throw std::runtime_error(command + ": " + outcome.output);
}

std::string in_quotes(const fs::path& path) { return "'" + path.string() + "'"; }

// Returns the command that runs a program in a mount namespace of its own, in which it may mount.
std::string unshare() { return ::geteuid() == 0 ? "unshare --mount" : "unshare --mount --map-root-user"; }

}  // namespace

Installation::Installation() : folder_(outside_of_bazel()), home_(folder_.path() + "/home") {
  const fs::path first = fs::path(folder_.path()) / "installed first";
  fs::create_directories(first);
  fs::create_directories(home_);
  must("tar -xf " + std::string(kTree) + " -C " + in_quotes(first));
  fs::rename(first, prefix());
}

fs::path Installation::project(const std::string& name) const {
  const fs::path folder = home_ / name;
  must("cp -rL tests/consumers/" + name + " " + in_quotes(folder));
  return folder;
}

ShellOutcome Installation::run(const fs::path& folder, const std::string& lines) const {
  const fs::path script = home_ / "run.sh";
  write_text(script,
             "set -euo pipefail\n"
             "mount -t tmpfs none " +
                 in_quotes(source_folder()) +
                 "\n"
                 "mount -t tmpfs none " +
                 in_quotes(output_base()) +
                 "\n"
                 "cd " +
                 in_quotes(folder) +
                 "\n"
                 "export HOME=" +
                 in_quotes(home_) + " LIBTORCH=" + in_quotes(libtorch_folder()) +
                 "\n"
                 "export TESSERA_LIBTORCH=$LIBTORCH\n" +
                 lines);
  const ShellOutcome can = shell(unshare() + " mount -t tmpfs none " + in_quotes(home_));
  if (can.exit_code != 0) throw std::runtime_error(unshare() + ", which hides the source tree, fails: " + can.output);
  return shell(unshare() + " bash " + in_quotes(script));
}

fs::path libtorch_folder() {
  const fs::path version = "external/libtorch/include/torch/headeronly/version.h";
  return fs::canonical(version).parent_path().parent_path().parent_path().parent_path();
}

fs::path source_folder() { return fs::canonical("WORKSPACE").parent_path(); }

fs::path output_base() {
  const std::string tree = fs::canonical(kTree).string();
  const std::size_t end = tree.find("/execroot/");
  if (end == std::string::npos) throw std::runtime_error(tree + " is not below Bazel's output base");
  return tree.substr(0, end);
}

std::string page_commands(const std::string& part) {
  const Page page = parse_page("docs/install.md", read_text("docs/install.md"));
  std::string found;
  for (const Block& block : page.blocks) {
    if (block.language == "sh" && block.text.find(part) != std::string::npos) found += block.text;
  }
  if (found.empty()) throw std::runtime_error("docs/install.md has no commands with " + part);
  return found;
}

std::string read_text(const fs::path& file) {
  std::ifstream in(file);
  if (!in) throw std::runtime_error("cannot read " + file.string());
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_text(const fs::path& file, const std::string& text) {
  fs::create_directories(file.parent_path());
  std::ofstream(file) << text;
}

}  // namespace tessera::testing
