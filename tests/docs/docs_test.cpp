// The pages of documentation say what the tree has: their code is compiled and run, their commands and files are there.

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <regex>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/tests/docs/pages.h"
#include "tessera/tests/ground/source_tree.h"
#include "tessera/tests/harness/shell.h"
#include "tessera/tools/launcher/private_folder.h"

namespace {

namespace fs = std::filesystem;
using tessera::testing::all_matches;
using tessera::testing::Block;
using tessera::testing::lines_of;
using tessera::testing::Page;
using tessera::testing::read_file;
using tessera::testing::shell;
using tessera::testing::ShellOutcome;
using tessera::testing::squeezed;

const fs::path& root() {
  static const fs::path path = tessera::testing::source_root();
  return path;
}

// A folder that is not there yet and has its place in the order of layers.
const std::string kComing = "styles/layers";

// Pages whose code stands in tests/docs.
bool is_compiled(const Page& page) { return page.path != "docs/testing.md"; }

// The texts of the files below `folders` whose names end with one of `endings`.
std::vector<std::string> texts_of(const std::vector<std::string>& folders, const std::vector<std::string>& endings) {
  std::vector<std::string> texts;
  for (const std::string& folder : folders) {
    for (const fs::path& file : tessera::testing::files_below(root() / folder, endings)) {
      texts.push_back(read_file(root() / folder / file));
    }
  }
  return texts;
}

bool any_contains(const std::vector<std::string>& texts, const std::string& part) {
  return std::any_of(texts.begin(), texts.end(),
                     [&](const std::string& text) { return text.find(part) != std::string::npos; });
}

std::vector<std::string> squeezed_all(std::vector<std::string> texts) {
  for (std::string& text : texts) text = squeezed(text);
  return texts;
}

// Blanks at line ends, and figures that a machine rounds otherwise, do not count.
std::string comparable(const std::string& text) {
  std::string out;
  for (const std::string& line : lines_of(text)) {
    const std::string rounded = std::regex_replace(line, std::regex("[0-9.]+e-[0-9]+"), "X");
    out += rounded.substr(0, rounded.find_last_not_of(' ') + 1) + "\n";
  }
  return out;
}

std::string output_of_four_ranks(const std::string& program) {
  const ShellOutcome outcome = shell("timeout 120 tools/launcher/launch --no-prefix -n 4 " + program);
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 0);
  return comparable("\n" + outcome.output);
}

// What a tool of tools/ says of its options.
std::string help_of(const std::string& tool) {
  if (tool == "launch") return shell("tools/launcher/launch --help").output;
  const std::string script = read_file(root() / "tools" / tool);
  return tool == "demo" ? script + shell("examples/embed/embed --help").output : script;
}

void check_label(const std::string& where, const std::string& folder, const std::string& name) {
  const std::string build = read_file(root() / folder / "BUILD.bazel");
  const std::string message = where + " names //" + folder + ":" + name + ", which is not there";
  CHECK_MESSAGE(build.find("name = \"" + name + "\"") != std::string::npos, message);
}

}  // namespace

TEST_CASE("docs: blocks and spans of a page are found") {
  const Page page = tessera::testing::parse_page("x.md", "One `a b`.\n```cpp\nint `x`;\n```\nTwo `c`.\n");
  REQUIRE(page.blocks.size() == 1);
  CHECK(page.blocks[0].language == "cpp");
  CHECK(page.blocks[0].text == "int `x`;\n");
  CHECK(page.spans == std::vector<std::string>{"a b", "c"});
}

TEST_CASE("docs: every piece of C++ stands in a file that is compiled and run") {
  const std::vector<std::string> sources = texts_of({"tests/docs", "examples/custom_placement"}, {".cpp", ".h"});
  const std::vector<std::string> code = squeezed_all(sources);
  int pieces = 0;
  for (const Page& page : tessera::testing::read_pages(root())) {
    if (!is_compiled(page)) continue;
    for (const Block& block : page.blocks) {
      if (block.language != "cpp") continue;
      ++pieces;
      const std::string message = page.path + " has code that tests/docs has not:\n" + block.text;
      for (const std::string& include : all_matches(block.text, "#include [^\n]+")) {
        CHECK_MESSAGE(any_contains(sources, include), message);
      }
      const std::string rest = std::regex_replace(block.text, std::regex("#include [^\n]+"), "");
      CHECK_MESSAGE(any_contains(code, squeezed(rest)), message);
    }
  }
  CHECK(pieces >= 8);
}

TEST_CASE("docs: every piece of a BUILD file stands in one") {
  const std::vector<std::string> builds = squeezed_all(texts_of({"tests/docs", "tests/external"}, {"BUILD.bazel"}));
  for (const Page& page : tessera::testing::read_pages(root())) {
    if (!is_compiled(page)) continue;
    for (const Block& block : page.blocks) {
      if (block.language != "python") continue;
      const std::regex empty_line("\n\n");
      for (std::sregex_token_iterator it(block.text.begin(), block.text.end(), empty_line, -1), end; it != end; ++it) {
        const std::string message = page.path + " has lines that no BUILD file here has:\n" + it->str();
        CHECK_MESSAGE(any_contains(builds, squeezed(it->str())), message);
      }
    }
  }
}

TEST_CASE("docs: what programs print is what the pages show") {
  const tessera::PrivateFolder folder;
  const std::string model = std::getenv("MINILM");
  const std::vector<std::string> outputs = {
      output_of_four_ranks("tests/docs/first"),
      comparable("\n" + shell("tests/docs/explained").output),
      output_of_four_ranks("tests/docs/train " + folder.path()),
      output_of_four_ranks("examples/embed/embed --weights " + model + " --vocab " + model + "/vocab.txt"),
  };
  for (const Page& page : tessera::testing::read_pages(root())) {
    if (!is_compiled(page)) continue;
    for (const Block& block : page.blocks) {
      if (block.language != "text") continue;
      const std::string message = page.path + " shows what no program printed:\n" + block.text + "\nprinted was:\n" +
                                  outputs[0] + outputs[1] + outputs[2];
      CHECK_MESSAGE(any_contains(outputs, "\n" + comparable(block.text)), message);
    }
  }
}

TEST_CASE("docs: every tool, option, label and configuration is there") {
  const std::string bazelrc = read_file(root() / ".bazelrc");
  for (const Page& page : tessera::testing::read_pages(root())) {
    for (const std::string& tool : all_matches(page.text, "\\btools/([a-z]+)\\b(?![/_.])")) {
      const std::string message = page.path + " names tools/" + tool + ", which is not there";
      CHECK_MESSAGE(fs::exists(root() / "tools" / tool), message);
    }
    const std::regex command("tools/([a-z]+)((?: +-[^`\n ]+(?: [A-Z0-9]+)?)+)");
    for (std::sregex_iterator it(page.text.begin(), page.text.end(), command), end; it != end; ++it) {
      const std::string help = help_of((*it)[1]);
      for (const std::string& option : all_matches((*it)[2], "(--?[a-z][a-z-]*)")) {
        const std::string message = page.path + " names " + it->str() + ", whose help has no " + option;
        CHECK_MESSAGE(help.find(option) != std::string::npos, message);
      }
    }
    const std::regex label("([^@a-z/])//([a-z_/]+):([a-z_]+)(?![a-z_.])");
    for (std::sregex_iterator it(page.text.begin(), page.text.end(), label), end; it != end; ++it) {
      check_label(page.path, (*it)[2], (*it)[3]);
    }
    for (const std::string& config : all_matches(page.text, "--config=([a-z]+)")) {
      const std::string message = page.path + " names --config=" + config + ", which .bazelrc has not";
      CHECK_MESSAGE(bazelrc.find("build:" + config + " ") != std::string::npos, message);
    }
  }
}

TEST_CASE("docs: every link, file and folder is there") {
  const std::regex in_tree(
      "(mesh|placement|dtensor|ops|styles|tests|docs|examples|bench|tools|third_party)/[A-Za-z0-9_./]*");
  for (const Page& page : tessera::testing::read_pages(root())) {
    for (const std::string& link : all_matches(page.text, "\\]\\(([^)#:]+)\\)")) {
      const std::string message = page.path + " links to " + link + ", which is not there";
      CHECK_MESSAGE(fs::exists((root() / page.path).parent_path() / link), message);
    }
    for (const std::string& span : page.spans) {
      const std::string message = page.path + " names " + span + ", which is not there";
      if (std::regex_match(span, in_tree) && span != kComing) CHECK_MESSAGE(fs::exists(root() / span), message);
    }
  }
}

TEST_CASE("docs: every name stands in the tree") {
  const std::vector<std::string> sources =
      texts_of({"mesh", "placement", "dtensor", "ops", "styles", "tests", "examples", "tools", "third_party"},
               {".h", ".cpp", ".bzl", ".bazel", "setup", "lib.sh"});
  const std::regex name("(?:tessera::|torch::|at::|std::)*[A-Za-z_][A-Za-z_0-9]{3,}(?:\\(\\))?");
  for (const Page& page : tessera::testing::read_pages(root())) {
    if (!is_compiled(page)) continue;
    for (const std::string& span : page.spans) {
      if (!std::regex_match(span, name)) continue;
      std::string last = span.substr(span.rfind(':') == std::string::npos ? 0 : span.rfind(':') + 1);
      last = last.substr(0, last.find('('));
      const std::string message = page.path + " names " + span + ", which no source has";
      CHECK_MESSAGE(any_contains(sources, last), message);
    }
  }
}
