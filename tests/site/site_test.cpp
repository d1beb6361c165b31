// Checks the site that tools/docs builds: its links and anchors, its names, its search, its looks in a browser, and the
// checks themselves on sites that are broken on purpose.

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <doctest/doctest.h>

#include "tessera/tests/ground/source_tree.h"
#include "tessera/tests/harness/shell.h"
#include "tessera/tools/launcher/private_folder.h"

namespace {

namespace fs = std::filesystem;
using tessera::testing::shell;
using tessera::testing::ShellOutcome;

const std::string kPython = "../tessera_environment/docs_python -B ";

std::string root() { return tessera::testing::source_root().string(); }

void write(const std::string& file, const std::string& text) { std::ofstream(file) << text; }

// Runs tools/docs, as a user does, with the environment that the build found.
ShellOutcome build_site(const std::string& folder) {
  return shell("export XDG_CACHE_HOME=$(" + kPython +
               "-c 'import pathlib, sys; print(pathlib.Path(sys.prefix).parent.parent)') && timeout 600 " + root() +
               "/tools/docs " + folder);
}

struct Site {
  std::string path;
  ShellOutcome outcome;
};

// Returns the site, which is built once, in a folder where an older one is.
const Site& built() {
  static const tessera::PrivateFolder folder;
  static const Site built = [] {
    const std::string path = folder.path() + "/site";
    fs::create_directory(path);
    write(path + "/objects.inv", "");
    write(path + "/old.html", "");
    return Site{.path = path, .outcome = build_site(path)};
  }();
  return built;
}

const std::string& site() {
  REQUIRE(built().outcome.exit_code == 0);
  return built().path;
}

void check_passes(const std::string& command) {
  const ShellOutcome outcome = shell(kPython + command);
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 0);
}

void check_finds(const std::string& command, const std::string& problem) {
  const ShellOutcome outcome = shell(kPython + command);
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 1);
  CHECK(outcome.output.find(problem) != std::string::npos);
}

// Makes a tree in which //:tessera has the header a.h of mesh/, which includes b.h; the reference lists `headers`.
void make_tree(const std::string& folder, const std::string& headers) {
  for (const char* each : {"docs", "examples", "mesh", "tests/docs", "tools/site"}) {
    fs::create_directories(folder + "/" + each);
  }
  write(folder + "/BUILD.bazel", "tessera_library(name = \"tessera\", deps = [\"//mesh\"])\n");
  write(folder + "/mesh/BUILD.bazel", "tessera_library(name = \"mesh\", hdrs = [\"a.h\"])\n");
  write(folder + "/mesh/a.h", "#include \"tessera/mesh/b.h\"\n");
  for (const char* each : {"b.h", "c.h"}) write(folder + "/mesh/" + each, "");
  write(folder + "/tools/site/reference.toml",
        "[[group]]\ntitle = \"Meshes\"\nheaders = [" + headers + "]\n[internal]\nheaders = []\n");
}

// Copies what symbols.py reads of the source tree, and calls libtorch_version() another name there.
void copy_headers(const std::string& folder) {
  const ShellOutcome copied = shell("cd '" + root() + "' && find . -name '*.h' -not -path './.*' -print0 |\n" +
                                    "xargs -0 cp --parents -t '" + folder + "' tools/site/reference.toml");
  REQUIRE(copied.exit_code == 0);
  REQUIRE(shell("sed -i 's/ libtorch_version()/ libtorch_version_now()/' '" + folder + "/version.h'").exit_code == 0);
}

// Returns where browser.py puts its pictures: beside the test's log, if Bazel runs the test.
std::string pictures(const std::string& otherwise) {
  const char* const outputs = std::getenv("TEST_UNDECLARED_OUTPUTS_DIR");
  return outputs != nullptr ? outputs : otherwise;
}

}  // namespace

TEST_CASE("site: it is built without a warning, in place of an older one") {
  CAPTURE(built().outcome.output);
  CHECK(built().outcome.exit_code == 0);
  CHECK(built().outcome.output.find("WARNING") == std::string::npos);
  CHECK(fs::exists(built().path + "/index.html"));
  CHECK_FALSE(fs::exists(built().path + "/old.html"));
}

TEST_CASE("site: a folder with other files is left as it is") {
  const tessera::PrivateFolder folder;
  write(folder.path() + "/letter.txt", "");
  const ShellOutcome outcome = build_site(folder.path());
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 1);
  CHECK(outcome.output.find(folder.path() + " has other files than a site; name a new or an empty folder") !=
        std::string::npos);
  CHECK(fs::exists(folder.path() + "/letter.txt"));
}

TEST_CASE("site: every link and anchor is there, and nothing is fetched from a network") {
  check_passes("tests/site/links.py " + site());
}

TEST_CASE("site: every public name of the headers has an entry, beside a link to its line") {
  check_passes("tests/site/symbols.py " + site() + " " + root());
}

TEST_CASE("site: every C++ example of a public header's comments is compiled and run") {
  check_passes("tests/site/examples.py " + root() + " tests/site/examples_test.cpp");
}

TEST_CASE("site: in a browser no page is wider than the window or writes to the console, and the search finds") {
  const tessera::PrivateFolder folder;
  check_passes("tests/site/browser.py " + site() + " " + pictures(folder.path()));
}

TEST_CASE("site: the checks find what is broken") {
  const tessera::PrivateFolder folder;
  const std::string page = folder.path() + "/index.html";
  const std::string links = "tests/site/links.py " + folder.path();
  const std::string browser = "tests/site/browser.py " + folder.path() + " " + folder.path() + "/pictures index.html";
  SUBCASE("a link to no file") {
    write(page, "<a href='other.html'>x</a>");
    check_finds(links, "other.html is not there");
  }
  SUBCASE("a link to no anchor") {
    write(page, "<a href='#there'>x</a><p id='here'>y</p>");
    check_finds(links, "#there has no such anchor");
  }
  SUBCASE("a script from elsewhere") {
    write(page, "<a href='#here'>x</a><p id='here'>y</p><script src='https://localhost/x.js'></script>");
    check_finds(links, "https://localhost/x.js is not in the site");
  }
  SUBCASE("a page that is too wide") {
    write(page, "<meta name='viewport' content='width=device-width'><div style='width: 500px'>x</div>");
    check_finds(browser, "index.html at 390 pixels: is 508 pixels wide");
  }
  SUBCASE("a content that scrolls in a page that is not too wide") {
    write(page, "<div class='content' style='width: 300px; overflow-x: auto'><p style='width: 400px'>x</p></div>");
    check_finds(browser, "index.html at 390 pixels: is 490 pixels wide");
  }
  SUBCASE("an error in the console") {
    write(page, "<script>throw new Error('broken on purpose')</script>");
    check_finds(browser, "broken on purpose");
  }
}

TEST_CASE("site: the checks of headers, names and examples find what is broken") {
  const tessera::PrivateFolder folder;
  SUBCASE("a header that the reference lacks, one that nobody reaches, and one that is listed twice") {
    make_tree(folder.path(), R"("mesh/a.h", "mesh/a.h", "mesh/c.h")");
    check_finds("tests/site/public_headers.py " + folder.path(),
                "mesh/b.h is not in tools/site/reference.toml\nmesh/c.h is listed, and users do not reach it\n"
                "mesh/a.h is listed twice\n2 headers, 3 problems");
  }
  SUBCASE("a target that a loop declares") {
    make_tree(folder.path(), R"("mesh/a.h")");
    write(folder.path() + "/mesh/BUILD.bazel", "[tessera_library(name = n, hdrs = [\"a.h\"]) for n in [\"mesh\"]]\n");
    check_finds("tests/site/public_headers.py " + folder.path(),
                "mesh/BUILD.bazel has no call tessera_library(name = \"mesh\", ...) at its top level");
  }
  SUBCASE("a name that the reference lacks, and one that its line does not declare") {
    copy_headers(folder.path());
    check_finds("tests/site/symbols.py " + site() + " " + folder.path(),
                "libtorch_version_now: the reference lacks it\nlibtorch_version: version.h, line ");
  }
  SUBCASE("an example that no test has") {
    const std::string test = folder.path() + "/no_test.cpp";
    write(test, "// const DeviceMesh mesh\n");
    check_finds("tests/site/examples.py " + root() + " " + test,
                "mesh/in_process.h has an example that " + test + " has not:\n");
  }
}
