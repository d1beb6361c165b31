#pragma once

#include <filesystem>
#include <string>

#include "tessera/tests/harness/shell.h"
#include "tessera/tools/launcher/private_folder.h"

// Helps to test what tools/install installs, with projects of strangers.
namespace tessera::testing {

// Holds Tessera, installed in a folder of its own and then moved to home()/tessera, with the projects that use it
// beside it. The destructor removes all.
class Installation {
 public:
  Installation();

  const std::filesystem::path& home() const { return home_; }
  std::filesystem::path prefix() const { return home_ / "tessera"; }

  // Copies tests/consumers/NAME to home()/NAME and returns that folder.
  std::filesystem::path project(const std::string& name) const;

  // Runs lines of bash in `folder` until one fails. HOME is home(), and LibTorch is named by TESSERA_LIBTORCH and
  // LIBTORCH. The source tree and Bazel's outputs cannot be seen: empty folders are mounted over them, in a mount
  // namespace of this command. Throws std::runtime_error where no such namespace can be made.
  ShellOutcome run(const std::filesystem::path& folder, const std::string& lines) const;

 private:
  PrivateFolder folder_;
  std::filesystem::path home_;
};

// Returns the folder of the LibTorch that this test was built with.
std::filesystem::path libtorch_folder();

// Returns the folders that Installation::run hides: the source tree, and Bazel's output base.
std::filesystem::path source_folder();
std::filesystem::path output_base();

// Returns the commands of docs/install.md that contain `part`: one whole block.
std::string page_commands(const std::string& part);

std::string read_text(const std::filesystem::path& file);
void write_text(const std::filesystem::path& file, const std::string& text);

}  // namespace tessera::testing
