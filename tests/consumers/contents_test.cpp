// Looks at what tools/install installs: symbols, headers, and paths of the machine where it was built.

#include <cstdlib>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/tests/consumers/installation.h"
#include "tessera/version.h"

namespace {

namespace fs = std::filesystem;
using tessera::testing::Installation;
using tessera::testing::read_text;
using tessera::testing::shell;
using tessera::testing::ShellOutcome;

std::string output_of(const std::string& command) {
  const ShellOutcome outcome = shell(command);
  CAPTURE(outcome.output);
  CHECK_MESSAGE(outcome.exit_code == 0, command);
  return outcome.output;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// Returns the mangled names that a library exports.
std::vector<std::string> exported(const fs::path& library) {
  return lines_of(output_of("nm -D --defined-only --format=just-symbols '" + library.string() + "'"));
}

std::vector<fs::path> files_of(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file() && !entry.is_symlink()) files.push_back(entry.path());
  }
  return files;
}

// Returns the headers that are included in angle brackets, or in quotes.
std::vector<std::string> included(const fs::path& header, const char* pattern) {
  const std::string text = read_text(header);
  const std::regex include(pattern);
  std::vector<std::string> found;
  for (std::sregex_iterator it(text.begin(), text.end(), include), end; it != end; ++it) found.push_back((*it)[1]);
  return found;
}

}  // namespace

TEST_CASE("install: the library exports names of namespace tessera alone, and needs no library that is linked in") {
  const Installation installation;
  const std::string library = (installation.prefix() / "lib/libtessera.so").string();
  const std::vector<std::string> names = exported(library);
  CHECK(names.size() > 500);
  // Tables, types and thunks have a prefix of their own; what follows is the namespace.
  const std::regex ours("_Z(T[VTISHW]|Th[n0-9_]+|Tv[n0-9_]+|GV|GVZ|Z)?NK?7tessera.*");
  for (const std::string& name : names) CHECK_MESSAGE(std::regex_match(name, ours), name);
  const std::string undefined = output_of("nm -D --undefined-only -C '" + library + "'");
  for (const char* other : {" fmt::", " spdlog::", " nlohmann::"}) {
    CHECK_MESSAGE(undefined.find(other) == std::string::npos, other);
  }
  const std::string needed = output_of("readelf -d '" + library + "' | grep NEEDED");
  CHECK(needed.find("libtorch_cpu.so") != std::string::npos);
  CHECK(needed.find("fmt") == std::string::npos);
  CHECK(needed.find("spdlog") == std::string::npos);
}

TEST_CASE("install: the harness exports its own names, doctest's and main, and the launcher needs neither of them") {
  const Installation installation;
  const std::regex ours(
      "main|_Z(T[VTISHW]|GV|GVZ|Z)?NK?7(tessera7testing|doctest).*|_ZN28doctest_detail_test_suite_ns.*");
  const std::vector<std::string> names = exported(installation.prefix() / "lib/libtessera_harness.so");
  CHECK(names.size() > 50);
  for (const std::string& name : names) CHECK_MESSAGE(std::regex_match(name, ours), name);
  const std::string launch = (installation.prefix() / "bin/tessera-launch").string();
  const std::string needed = output_of("readelf -d '" + launch + "' | grep NEEDED");
  for (const char* other : {"fmt", "spdlog", "tessera", "torch"}) {
    CHECK_MESSAGE(needed.find(other) == std::string::npos, needed);
  }
  CHECK(output_of("'" + launch + "' -n 2 sh -c 'echo rank $RANK'").find("[1] rank 1") != std::string::npos);
}

TEST_CASE("install: the libraries have their version in their names, and links to it") {
  const Installation installation;
  const std::string abi = std::to_string(TESSERA_VERSION_MAJOR) + "." + std::to_string(TESSERA_VERSION_MINOR);
  for (const std::string name : {"libtessera.so", "libtessera_harness.so"}) {
    const fs::path lib = installation.prefix() / "lib";
    CHECK(fs::read_symlink(lib / name) == name + "." + abi);
    CHECK(fs::read_symlink(lib / (name + "." + abi)) == name + "." TESSERA_VERSION);
    CHECK(output_of("readelf -d '" + (lib / name).string() + "'").find("soname: [" + name + "." + abi + "]") !=
          std::string::npos);
  }
}

TEST_CASE("install: no file has a path of the machine where it was built, and no link leads out") {
  const Installation installation;
  std::vector<std::string> paths = {tessera::testing::source_folder(), tessera::testing::output_base(),
                                    tessera::testing::libtorch_folder()};
  const std::size_t cache = paths[2].find("/.cache/");
  if (cache != std::string::npos) paths.push_back(paths[2].substr(0, cache + 7));  // the home folder's cache
  int files = 0;
  for (const fs::path& file : files_of(installation.prefix())) {
    ++files;
    const std::string content = read_text(file);
    for (const std::string& path : paths) {
      const std::string message = file.string() + " has " + path;
      CHECK_MESSAGE(content.find(path) == std::string::npos, message);
    }
  }
  CHECK(files > 100);
  for (const char* binary : {"lib/libtessera.so", "lib/libtessera_harness.so", "bin/tessera-launch"}) {
    const std::string dynamic = output_of("readelf -d '" + (installation.prefix() / binary).string() + "'");
    const std::regex folders("\\((?:RPATH|RUNPATH)\\)[^\\[]*\\[([^\\]]*)\\]");
    for (std::sregex_iterator it(dynamic.begin(), dynamic.end(), folders), end; it != end; ++it) {
      CHECK_MESSAGE((*it)[1].str() == "$ORIGIN", binary);
    }
  }
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(installation.prefix())) {
    if (entry.is_symlink()) CHECK_MESSAGE(fs::read_symlink(entry.path()).is_relative(), entry.path().string());
  }
}

TEST_CASE("install: headers include LibTorch, the standard library and each other, and nothing that is missing") {
  const Installation installation;
  const fs::path include = installation.prefix() / "include";
  const std::set<std::string> others = {"ATen", "c10", "torch"};
  int headers = 0;
  for (const fs::path& header : files_of(include)) {
    ++headers;
    for (const std::string& name : included(header, "#include \"([^\"]+)\"")) {
      const std::string message = header.string() + " includes " + name + ", which is not installed";
      CHECK_MESSAGE(fs::exists(include / name), message);
    }
    const bool is_harness = header.string().find("/tests/harness/") != std::string::npos;
    for (const std::string& name : included(header, "#include <([^>]+/[^>]+)>")) {
      const std::string owner = name.substr(0, name.find('/'));
      const std::string message = header.string() + " includes " + name;
      CHECK_MESSAGE((others.contains(owner) || owner == "sys" || (is_harness && owner == "doctest")), message);
    }
  }
  CHECK(headers > 100);
}

TEST_CASE("install: one program can include all headers, without warnings") {
  const Installation installation;
  const fs::path include = installation.prefix() / "include";
  std::string source;
  for (const fs::path& header : files_of(include)) {
    const std::string name = header.lexically_relative(include).string();
    if (name.find("/tests/") == std::string::npos) source += "#include \"" + name + "\"\n";
  }
  tessera::testing::write_text(installation.home() / "all.cpp", source + "int main() {}\n");
  const ShellOutcome outcome =
      installation.run(installation.home(),
                       "export PKG_CONFIG_PATH=~/tessera/lib/pkgconfig\n"
                       "g++ -std=c++20 -fsyntax-only -Wall -Wextra -Werror all.cpp "
                       "$(pkg-config --define-variable=libtorch=$LIBTORCH --cflags tessera)");
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 0);
}

TEST_CASE("install: tools/install unpacks over an earlier version, and refuses an option in the place of the folder") {
  const Installation installation;
  // A tree with the script, and stand-ins for what it calls: tools/setup, and a Bazel that has already built.
  const fs::path tree = installation.home() / "source";
  const std::string tar = fs::canonical("tools/packaging/tree.tar").string();
  fs::create_directories(tree / "tools");
  fs::create_directories(tree / "bin/tools/packaging");
  for (const char* file : {"tools/install", "tools/lib.sh"}) fs::copy_file(fs::canonical(file), tree / file);
  fs::create_symlink(tar, tree / "bin/tools/packaging/tree.tar");
  tessera::testing::write_text(tree / "tools/setup", "#!/bin/sh\n");
  tessera::testing::write_text(tree / "path/bazel", "#!/bin/sh\necho \"$@\" >>'" + (tree / "calls").string() +
                                                        "'\n[ \"$1\" = build ] || echo '" + (tree / "bin").string() +
                                                        "'\n");
  for (const char* file : {"tools/setup", "path/bazel"}) fs::permissions(tree / file, fs::perms::owner_all);
  const fs::path prefix = installation.home() / "there";
  tessera::testing::write_text(prefix / "include/tessera/gone.h", "");
  tessera::testing::write_text(prefix / "lib/libtessera.so.0.0.9", "");
  tessera::testing::write_text(prefix / "include/other.h", "");
  const std::string call = "cd '" + installation.home().string() + "' && PATH='" + (tree / "path").string() +
                           "':$PATH '" + (tree / "tools/install").string() + "' ";
  const ShellOutcome outcome = shell(call + "there --define=tessera_mpi=false");
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 0);
  CHECK(read_text(tree / "calls").find("build -c opt --define=tessera_mpi=false //tools/packaging:tree") == 0);
  CHECK(fs::exists(prefix / "lib/libtessera.so"));
  CHECK(fs::exists(prefix / "share/doc/tessera/LICENSE"));
  CHECK(fs::exists(prefix / "share/doc/tessera/libfmt-dev.copyright"));
  CHECK(fs::exists(prefix / "include/other.h"));
  CHECK_FALSE(fs::exists(prefix / "include/tessera/gone.h"));
  CHECK_FALSE(fs::exists(prefix / "lib/libtessera.so.0.0.9"));
  CHECK(shell(call + "--config=cuda").exit_code != 0);
  CHECK(shell(call).exit_code != 0);
}
