// Looks at what tools/install installs: symbols, headers, and paths of the machine where it was built.

#include <regex>
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

// Makes a source tree with tools/install in it, and stand-ins for what that calls: tools/setup, and a Bazel that has
// already built.
class Source {
 public:
  explicit Source(const fs::path& home) : home_(home) {
    fs::create_directories(tar().parent_path());
    fs::create_directories(folder() / "tools");
    for (const char* file : {"tools/install", "tools/lib.sh"}) fs::copy_file(fs::canonical(file), folder() / file);
    fs::create_symlink(fs::canonical("tools/packaging/tree.tar"), tar());
    tessera::testing::write_text(folder() / "tools/setup", "#!/bin/sh\n");
    tessera::testing::write_text(folder() / "path/bazel", "#!/bin/sh\necho \"$@\" >>'" + calls().string() +
                                                              "'\n[ \"$1\" = build ] || echo '" +
                                                              (folder() / "bin").string() + "'\n");
    for (const char* file : {"tools/setup", "path/bazel"}) fs::permissions(folder() / file, fs::perms::owner_all);
  }

  fs::path folder() const { return home_ / "source"; }
  fs::path tar() const { return folder() / "bin/tools/packaging/tree.tar"; }
  fs::path calls() const { return folder() / "calls"; }

  // Calls tools/install in the home folder. CDPATH names a folder that has the same ones.
  ShellOutcome install(const std::string& arguments) const {
    return shell("cd '" + home_.string() + "' && PATH='" + (folder() / "path").string() + "':$PATH CDPATH='" +
                 home_.string() + "' '" + (folder() / "tools/install").string() + "' " + arguments);
  }

 private:
  fs::path home_;
};

}  // namespace

TEST_CASE("install: the library exports names of namespace tessera alone, and needs no library that is linked in") {
  const Installation installation;
  const std::string library = (installation.prefix() / "lib/libtessera.so").string();
  const std::vector<std::string> names = exported(library);
  CHECK(names.size() > 500);
  // Tables, types and thunks have a prefix of their own; what follows is the namespace.
  const std::regex ours("_Z(T[VTISHW]|Th[n0-9_]+|Tv[n0-9_]+|GV|GVZ|Z)?NK?7tessera.*");
  for (const std::string& name : names) CHECK_MESSAGE(std::regex_match(name, ours), name);
  CHECK(output_of("readelf -d '" + library + "'").find("NOW") == std::string::npos);  // version.cpp's check comes first
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
      "main|_Z(T[VTISHWC]|GV|GVZ|Z)?NK?7(tessera7testing|doctest).*|_ZN28doctest_detail_test_suite_ns.*");
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

TEST_CASE("install: one program can include all headers, without warnings") {
  const Installation installation;
  const fs::path include = installation.prefix() / "include";
  std::string source;
  for (const fs::path& header : files_of(include)) {
    const std::string name = header.lexically_relative(include).string();
    if (name.find("/tests/") == std::string::npos) source += "#include \"" + name + "\"\n";
  }
  // GCC warns of each member that an initializer leaves out, unless it has a value of its own.
  source +=
      "using namespace tessera;\n"
      "int main() {\n"
      "  (void)ParallelizeOptions{.zero_stage = 3};\n"
      "  (void)RedistributeOptions{.async = true};\n"
      "  (void)FromLocalOptions{.check = true};\n"
      "}\n";
  tessera::testing::write_text(installation.home() / "all.cpp", source);
  const ShellOutcome outcome = installation.run(installation.home(),
                                                "export PKG_CONFIG_PATH=~/tessera/lib/pkgconfig\n"
                                                "g++ -std=c++20 -fsyntax-only -Wall -Wextra -Werror all.cpp "
                                                "$(pkg-config --define-variable=libtorch=$LIBTORCH --cflags tessera)");
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 0);
}

// The loader has little space for the thread_locals of libraries that are opened at run time.
TEST_CASE("install: a program that does not link with the library can open it, as for a plug-in") {
  const Installation installation;
  tessera::testing::write_text(installation.home() / "open.cpp",
                               "#include <dlfcn.h>\n#include <cstdio>\n"
                               "int main() {\n"
                               "  if (dlopen(\"libtessera.so\", RTLD_NOW | RTLD_GLOBAL) != nullptr) return 0;\n"
                               "  std::puts(dlerror());\n"
                               "  return 1;\n"
                               "}\n");
  const ShellOutcome outcome = installation.run(
      installation.home(), "g++ open.cpp -o open -ldl\nLD_LIBRARY_PATH=~/tessera/lib:$LIBTORCH/lib ./open");
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 0);
}

TEST_CASE("install: pkg-config gives each path as one word where a folder has a blank in its name") {
  const Installation installation;
  const std::string moved = (installation.home() / "a folder").string();
  const ShellOutcome outcome =
      installation.run(installation.home(),
                       "mkdir 'a folder'\nmv tessera 'a folder'\n"
                       "export PKG_CONFIG_PATH=~/a\\ folder/tessera/lib/pkgconfig\n"
                       "eval set -- $(pkg-config --define-variable=libtorch='/a\\ torch' --cflags --libs tessera)\n"
                       "printf '[%s]\\n' \"$@\"");
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 0);
  const std::string below = moved + "/tessera/lib/pkgconfig/../..";
  for (const std::string& word :
       {"-isystem" + below + "/include", "-L" + below + "/lib", "-Wl,-rpath," + below + "/lib",
        std::string("-isystem/a torch/include"), std::string("-isystem/a torch/include/torch/csrc/api/include"),
        std::string("-L/a torch/lib"), std::string("-Wl,-rpath,/a torch/lib")}) {
    CHECK_MESSAGE(outcome.output.find("[" + word + "]\n") != std::string::npos, word);
  }
}

TEST_CASE("install: all may read and enter what is unpacked, and the folder to which it is unpacked is no part of it") {
  const Installation installation;
  const std::string folder = installation.home().string();
  tessera::testing::write_text(folder + "/facts", "version=0.1.0\nabi_version=0.1\n");
  tessera::testing::write_text(folder + "/manifest", folder + "/facts\tlib/libx.so.@version@\n" + folder +
                                                         "/facts\tbin/x\n" + folder + "/facts\tshare/a/x\n");
  output_of("umask 077; tools/packaging/make_tree.sh " + folder + "/small.tar " + folder + "/manifest " + folder +
            "/facts");
  for (const std::string& tar : {folder + "/small.tar", std::string("tools/packaging/tree.tar")}) {
    const std::vector<std::string> lines = lines_of(output_of("tar -tvf " + tar));
    CHECK(lines.size() >= 9);
    const std::regex entry("(drwxr-xr-x .*/|-rw-r--r-- .*|-rwxr-xr-x .* bin/[^/]*|lrwxrwxrwx .*)");
    for (const std::string& line : lines) {
      CHECK_MESSAGE(std::regex_match(line, entry), line);
      CHECK_MESSAGE(line.find(" ./") == std::string::npos, line);
    }
  }
}

TEST_CASE("install: tools/install unpacks over an earlier version, and changes nothing else") {
  const Installation installation;
  const Source source(installation.home());
  const fs::path prefix = installation.home() / "there";
  for (const char* file : {"include/tessera/gone.h", "lib/libtessera.so.0.0.9", "include/other.h"}) {
    tessera::testing::write_text(prefix / file, "");
  }
  output_of("chmod 755 '" + prefix.string() + "'; chmod 2775 '" + (prefix / "include").string() + "'");
  output_of("mkdir '" + (prefix / "lib64").string() + "'; ln -s lib64 '" + (prefix / "share").string() + "'");
  const ShellOutcome outcome = source.install("there --define=tessera_mpi=false");
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 0);
  CHECK(read_text(source.calls()).find("build --config=optimized --define=tessera_mpi=false //tools/packaging:tree") ==
        0);
  CHECK(fs::exists(prefix / "lib/libtessera.so"));
  CHECK(fs::exists(prefix / "share/doc/tessera/LICENSE"));
  CHECK(fs::exists(prefix / "share/doc/tessera/libfmt-dev.copyright"));
  CHECK(fs::exists(prefix / "include/other.h"));
  CHECK_FALSE(fs::exists(prefix / "include/tessera/gone.h"));
  CHECK_FALSE(fs::exists(prefix / "lib/libtessera.so.0.0.9"));
  CHECK(output_of("stat -c %a '" + prefix.string() + "' '" + (prefix / "include").string() + "'") == "755\n2775\n");
  CHECK(fs::is_symlink(prefix / "share"));
}

TEST_CASE("install: what tools/install unpacks is newer than what was built with an earlier version") {
  const Installation installation;
  const Source source(installation.home());
  CHECK(source.install("there").exit_code == 0);
  const fs::path built = installation.home() / "built.o", prefix = installation.home() / "there";
  tessera::testing::write_text(built, "");
  CHECK(source.install("there").exit_code == 0);
  for (const char* file : {"include/tessera/version.h", "lib/libtessera.so", "lib/cmake/Tessera/TesseraConfig.cmake"}) {
    CHECK_MESSAGE(fs::last_write_time(prefix / file) >= fs::last_write_time(built), file);
  }
}

TEST_CASE(
    "install: tools/install refuses an option in the place of the folder, and removes nothing before it has built") {
  const Installation installation;
  const Source source(installation.home());
  CHECK(source.install("--config=cuda").exit_code != 0);
  CHECK(source.install("").exit_code != 0);
  CHECK(source.install("there").exit_code == 0);
  fs::remove(source.tar());
  CHECK(source.install("there").exit_code != 0);
  CHECK(fs::exists(installation.home() / "there/lib/libtessera.so"));
  CHECK(fs::exists(installation.home() / "there/include/tessera/version.h"));
}
