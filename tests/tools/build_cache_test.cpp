// Runs tools/build_cache in a checkout of its own and reads what it tells Bazel.

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include <doctest/doctest.h>

#include "tessera/tests/harness/shell.h"
#include "tessera/tools/launcher/private_folder.h"

namespace {

namespace fs = std::filesystem;
using tessera::testing::shell;
using tessera::testing::ShellOutcome;

// Makes a folder with the script in it, below a folder with a blank in its name, which is HOME too.
class Checkout {
 public:
  Checkout() : home_(fs::path(folder_.path()) / "a home") {
    fs::create_directories(root() / "tools");
    fs::copy_file(fs::canonical("tools/build_cache"), root() / "tools/build_cache");
  }

  const fs::path& home() const { return home_; }
  fs::path root() const { return home_ / "checkout"; }
  fs::path file() const { return root() / "build_cache.bazelrc"; }

  // Runs the script with `environment`, and returns what it has written for Bazel.
  std::string run(const std::string& environment = "") const {
    const ShellOutcome outcome = shell("env -u TESSERA_BUILD_CACHE -u XDG_CACHE_HOME HOME='" + home_.string() + "' " +
                                       environment + " '" + (root() / "tools/build_cache").string() + "' g++");
    CAPTURE(outcome.output);
    CHECK(outcome.exit_code == 0);
    std::ifstream in(file());
    return {std::istreambuf_iterator<char>(in), {}};
  }

 private:
  tessera::PrivateFolder folder_;
  fs::path home_;
};

// Returns the folder that the file names for Bazel, without the name that stands for the system.
std::string folder_in(const std::string& content) {
  const std::string before = "build \"--disk_cache=";
  const std::size_t at = content.find(before);
  if (at == std::string::npos) return "";
  const std::string path = content.substr(at + before.size());
  CHECK(path.substr(path.size() - 2) == "\"\n");
  CHECK(fs::path(path.substr(0, path.size() - 2)).filename().string().size() == 16);
  return fs::path(path).parent_path().string();
}

// Makes a file that was last read so many days ago.
void make_file(const fs::path& file, int days) {
  fs::create_directories(file.parent_path());
  std::ofstream(file) << "x";
  CHECK(shell("touch -a -d '" + std::to_string(days) + " days ago' '" + file.string() + "'").exit_code == 0);
}

}  // namespace

TEST_CASE("build_cache: the folder is in the user's cache, and a blank in it is in quotes") {
  const Checkout checkout;
  CHECK(folder_in(checkout.run()) == (checkout.home() / ".cache/tessera/build").string());
  CHECK(folder_in(checkout.run("XDG_CACHE_HOME=")) == (checkout.home() / ".cache/tessera/build").string());
  CHECK(folder_in(checkout.run("XDG_CACHE_HOME='" + checkout.home().string() + "/x'")) ==
        (checkout.home() / "x/tessera/build").string());
}

TEST_CASE("build_cache: a choice holds until another one, or until the file is deleted") {
  const Checkout checkout;
  CHECK(folder_in(checkout.run("TESSERA_BUILD_CACHE=none")).empty());
  CHECK(folder_in(checkout.run()).empty());
  CHECK(folder_in(checkout.run("TESSERA_BUILD_CACHE=")).empty());
  CHECK(folder_in(checkout.run("TESSERA_BUILD_CACHE=../beside")) == (checkout.home() / "beside").string());
  CHECK(folder_in(checkout.run()) == (checkout.home() / "beside").string());
  fs::remove(checkout.file());
  CHECK(folder_in(checkout.run()) == (checkout.home() / ".cache/tessera/build").string());
}

TEST_CASE("build_cache: only what Bazel has made and no build has used for two weeks is deleted") {
  const Checkout checkout;
  const fs::path cache = checkout.home() / ".cache/tessera/build";
  const fs::path of_other_compiler = cache / "0123456789abcdef";
  struct Row {
    fs::path file;
    int days;
    bool stays;
  };
  const Row rows[] = {{of_other_compiler / "cas/ab/old", 20, false},
                      {of_other_compiler / "ac/ab/old", 20, false},
                      {of_other_compiler / "cas/ab/new", 10, true},
                      {of_other_compiler / "old", 20, true},
                      {cache / "pictures/cas/old", 20, true}};
  for (const Row& row : rows) make_file(row.file, row.days);
  checkout.run();
  for (const Row& row : rows) {
    CAPTURE(row.file);
    CHECK(fs::exists(row.file) == row.stays);
  }
}

TEST_CASE("build_cache: without a folder that can be written there is no cache, and a message says so") {
  const Checkout checkout;
  std::ofstream(checkout.home() / "file") << "x";
  CHECK(folder_in(checkout.run("TESSERA_BUILD_CACHE=../file/below")).empty());
  const ShellOutcome outcome = shell("'" + (checkout.root() / "tools/build_cache").string() + "'");
  CHECK(outcome.exit_code == 0);
  CHECK(outcome.output.find("cannot be written, so there is no build cache") != std::string::npos);
}
