// Compares the pages of documentation with the tree: their code is compiled and run, their commands and files exist.

#include <algorithm>
#include <cctype>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

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

// Says whether the code of the page is in tests/docs.
bool is_compiled(const Page& page) { return page.path != "docs/testing.md"; }

// Returns the texts of the files below `folders` whose names end with one of `endings`.
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

// Returns the text without blanks at line ends, without figures that other machines round differently, and without the
// words of Gloo's own, which name ports and differ with what it was doing.
std::string comparable(const std::string& text) {
  std::string out;
  for (const std::string& line : lines_of(text)) {
    std::string rounded = std::regex_replace(line, std::regex("[0-9.]+e-[0-9]+"), "X");
    rounded = std::regex_replace(rounded, std::regex("\\(\\[.*gloo.*\\)$"), "(what Gloo says)");
    out += rounded.substr(0, rounded.find_last_not_of(' ') + 1) + "\n";
  }
  return out;
}

std::string output_of_four_ranks(const std::string& program, int exit_code = 0) {
  const ShellOutcome outcome = shell("timeout 120 tools/launcher/launch --no-prefix -n 4 " + program);
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == exit_code);
  return comparable("\n" + outcome.output);
}

using Words = std::vector<std::string>;

// Returns the commands that a page tells its reader to run: its spans, and its lines of shell without comments.
std::vector<Words> commands_of(const Page& page) {
  std::vector<std::string> texts = page.spans;
  for (const Block& block : page.blocks) {
    if (block.language != "sh") continue;
    for (const std::string& line : lines_of(block.text)) texts.push_back(line.substr(0, line.find('#')));
  }
  std::vector<Words> commands;
  for (const std::string& text : texts) commands.push_back(all_matches(text, "[^ \n]+"));
  return commands;
}

// Returns the options of a command that starts with a tool, without their values and without the program of
// tools/launch.
Words options_of(const Words& command) {
  Words options;
  for (const std::string& word : Words(command.begin() + 1, command.end())) {
    if (command[0] == "tools/launch" && (word == "PROGRAM" || word.find('/') != std::string::npos)) break;
    if (word.starts_with("-")) options.push_back(word.substr(0, word.find('=')));
  }
  return options;
}

bool has_option(const std::string& help, const std::string& option) {
  return std::regex_search(help, std::regex("(^|[^a-z0-9-])" + option + "(?![a-z0-9-])"));
}

bool is_benchmark(const std::string& name) {
  return std::regex_search(read_file(root() / "bench/BUILD.bazel"),
                           std::regex("tessera_binary\\(\\s*name = \"" + name + "\""));
}

// Returns what a tool of tools/ prints as help on this command's options.
std::string help_of(const Words& command) {
  const std::string tool = command[0].substr(std::string("tools/").size());
  if (tool == "launch") return shell("tools/launcher/launch --help").output;
  if (tool == "bench" && command.size() > 1) {
    std::string help;
    std::string source = read_file(root() / "bench" / (command[1] + ".cpp"));
    if (source.find("add_options(app") != std::string::npos) source += read_file(root() / "bench/two_sides.cpp");
    for (const std::string& names : all_matches(source, "add_(?:option|flag)\\(\"([^\"]+)\"")) help += names + "\n";
    return help;
  }
  const std::string script = read_file(root() / "tools" / tool);
  if (tool == "demo") return script + shell("examples/embed/embed --help").output;
  if (tool == "generate") return script + shell("examples/generate/generate --help").output;
  return tool == "train" ? script + shell("examples/train/train --help").output : script;
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
  const std::vector<std::string> sources = texts_of({"tests/docs", "tests/consumers/bazel", "examples/custom_placement",
                                                     "examples/generate", "examples/language_model", "examples/train"},
                                                    {".cpp", ".h"});
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
  const std::vector<std::string> builds = squeezed_all(texts_of({"tests/docs", "tests/consumers"}, {"BUILD.bazel"}));
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

TEST_CASE("docs: every piece of CMake and of make is a file of tests/consumers") {
  const std::vector<std::string> files = texts_of({"tests/consumers"}, {"CMakeLists.txt", "Makefile"});
  int pieces = 0;
  for (const Page& page : tessera::testing::read_pages(root())) {
    for (const Block& block : page.blocks) {
      if (block.language != "cmake" && block.language != "make") continue;
      ++pieces;
      const std::string message = page.path + " has lines that no project of tests/consumers has:\n" + block.text;
      CHECK_MESSAGE(std::count(files.begin(), files.end(), block.text) == 1, message);
    }
  }
  CHECK(pieces >= 3);
}

TEST_CASE("docs: what programs print is what the pages show") {
  const tessera::PrivateFolder folder;
  const std::string model = std::getenv("MINILM");
  const std::vector<std::string> outputs = {
      output_of_four_ranks("tests/docs/first"),
      comparable("\n" + shell("tests/docs/explained").output),
      comparable("\n" + shell("tests/docs/pictures").output),
      output_of_four_ranks("tests/docs/train " + folder.path()),
      output_of_four_ranks("tests/docs/user_operator"),
      output_of_four_ranks("tests/docs/failing", 128 + SIGKILL),
      output_of_four_ranks("examples/embed/embed --weights " + model + " --vocab " + model + "/vocab.txt"),
  };
  for (const Page& page : tessera::testing::read_pages(root())) {
    if (!is_compiled(page)) continue;
    for (const Block& block : page.blocks) {
      if (block.language != "text") continue;
      const std::string message = page.path + " shows what no program printed:\n" + block.text + "\nprinted was:\n" +
                                  fmt::format("{}", fmt::join(outputs, ""));
      CHECK_MESSAGE(any_contains(outputs, "\n" + comparable(block.text)), message);
    }
  }
}

TEST_CASE("docs: tools/launch sets the variables that the page says, and no others that tell a rank") {
  const std::string page = read_file(root() / "docs/getting-started.md");
  const std::vector<std::string> row = all_matches(page, "\n\\| `tools/launch` \\|([^\n]*)");
  REQUIRE(row.size() == 1);
  std::vector<std::string> names = all_matches(row[0], "`([A-Z_]+)`");
  CHECK(names.size() == 5);
  names.push_back("OMP_NUM_THREADS");
  const ShellOutcome outcome = shell(
      "env -u OMP_NUM_THREADS TESSERA_RANK=7 OMPI_COMM_WORLD_RANK=7 SLURM_PROCID=7 MASTER_ADDR=x "
      "tools/launcher/launch --no-prefix -n 1 env");
  REQUIRE(outcome.exit_code == 0);
  for (const std::string& name : names) {
    CAPTURE(name);
    CHECK(("\n" + outcome.output).find("\n" + name + "=") != std::string::npos);
  }
  for (const char* name : {"TESSERA_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "MASTER_ADDR"}) {
    CAPTURE(name);
    CHECK(("\n" + outcome.output).find(std::string("\n") + name + "=") == std::string::npos);
  }
}

TEST_CASE("docs: every tool, option, label and configuration is there") {
  const std::string bazelrc = read_file(root() / ".bazelrc");
  int options = 0;
  for (const Page& page : tessera::testing::read_pages(root())) {
    for (const std::string& tool : all_matches(page.text, "\\btools/([a-z]+)\\b(?![/_.])")) {
      const std::string message = page.path + " names tools/" + tool + ", which is not there";
      CHECK_MESSAGE(fs::exists(root() / "tools" / tool), message);
    }
    for (const Words& command : commands_of(page)) {
      if (command.empty() || !std::regex_match(command[0], std::regex("tools/[a-z]+"))) continue;
      if (command[0] == "tools/bench" && command.size() > 1 && command[1] != "NAME") {
        const std::string message = page.path + " names tools/bench " + command[1] + ", which is not there";
        CHECK_MESSAGE(is_benchmark(command[1]), message);
      }
      for (const std::string& option : options_of(command)) {
        ++options;
        const std::string message = page.path + " gives " + option + " to " + command[0] + ", which does not take it";
        CHECK_MESSAGE(has_option(help_of(command), option), message);
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
  CHECK(options >= 15);
}

namespace {

// Returns the anchor that GitHub and the site give to a heading: `Save, and "resume"` has save-and-resume.
std::string anchor_of(const std::string& heading) {
  std::string anchor;
  for (const char c : heading) {
    if (c == ' ') anchor += '-';
    if (std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_') {
      anchor += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
  }
  return anchor;
}

std::set<std::string> anchors_of(const Page& page) {
  std::set<std::string> anchors;
  for (const std::string& line : lines_of(page.prose)) {
    for (const std::string& heading : all_matches(line, "^#+ (.+)$")) anchors.insert(anchor_of(heading));
  }
  return anchors;
}

// Returns the links of the pages to files or to headings that are not there.
std::vector<std::string> broken_links(const std::vector<Page>& pages) {
  std::map<std::string, std::set<std::string>> anchors;
  for (const Page& page : pages) anchors[page.path] = anchors_of(page);
  std::vector<std::string> broken;
  for (const Page& page : pages) {
    for (const std::string& link : all_matches(page.prose, "\\]\\(([^):]+)\\)")) {
      const std::string file = link.substr(0, link.find('#'));
      const fs::path path = file.empty() ? fs::path(page.path) : fs::path(page.path).parent_path() / file;
      const auto target = anchors.find(path.lexically_normal().string());
      const bool has_anchor = link.size() > file.size();
      const bool is_there = target == anchors.end()
                                ? !has_anchor && fs::exists(root() / path)
                                : !has_anchor || target->second.contains(link.substr(file.size() + 1));
      if (!is_there) broken.push_back(page.path + " links to " + link + ", which is not there");
    }
  }
  return broken;
}

}  // namespace

TEST_CASE("docs: every link is to a page, a heading or a file that is there") {
  const std::vector<std::string> broken = broken_links(tessera::testing::read_pages(root()));
  CHECK_MESSAGE(broken.empty(), fmt::format("{}", fmt::join(broken, "\n")));
}

TEST_CASE("docs: a broken link is found") {
  const auto broken = [](const std::string& text) {
    return broken_links(
        {tessera::testing::parse_page("docs/a.md", text),
         tessera::testing::parse_page("docs/b.md", "# The `end`: ZeRO-3\n\n```sh\n# no heading\n```\n")});
  };
  for (const char* link : {"b.md", "b.md#the-end-zero-3", "#here", "../WORKSPACE", "https://pytorch.org/docs#there"}) {
    CAPTURE(link);
    CHECK(broken(fmt::format("# Here\n\n[text]({})\n", link)).empty());
  }
  for (const char* link : {"c.md", "b.md#the-end", "b.md#no-heading", "#there", "../WORKSPACE#there", "../b.md"}) {
    CHECK(broken(fmt::format("# Here\n\n[text]({})\n", link)) ==
          std::vector<std::string>{fmt::format("docs/a.md links to {}, which is not there", link)});
  }
}

TEST_CASE("docs: every file and folder is there, a header with or without tessera/ before it") {
  const std::regex in_tree(
      "(?:tessera/)?"
      "((?:gpu_kernels|mesh|placement|dtensor|ops|styles|layers|tests|docs|examples|bench|tools|third_party)/"
      "[A-Za-z0-9_./]*)");
  int headers = 0;
  for (const Page& page : tessera::testing::read_pages(root())) {
    for (const std::string& span : page.spans) {
      std::smatch match;
      if (!std::regex_match(span, match, in_tree)) continue;
      headers += static_cast<int>(span.starts_with("tessera/"));
      const std::string message = page.path + " names " + span + ", which is not there";
      CHECK_MESSAGE(fs::exists(root() / match[1].str()), message);
    }
  }
  CHECK(headers >= 20);
}

namespace {

// Returns the spans of a page, without the first column of tables with other libraries' names.
std::vector<std::string> our_spans(const Page& page) {
  if (!page.path.starts_with("docs/coming-from")) return page.spans;
  std::string text;
  std::istringstream lines(page.text);
  for (std::string line; std::getline(lines, line); text += "\n") {
    text += line.starts_with("| ") ? line.substr(line.find('|', 1)) : line;
  }
  std::vector<std::string> spans;
  const std::regex span("`([^`]+)`");
  for (std::sregex_iterator it(text.begin(), text.end(), span), end; it != end; ++it) spans.push_back((*it)[1]);
  return spans;
}

}  // namespace

TEST_CASE("docs: every name stands in the tree") {
  const std::vector<std::string> sources =
      texts_of({"gpu_kernels", "mesh", "placement", "dtensor", "ops", "styles", "layers", "tests", "examples", "bench",
                "tools", "third_party"},
               {".h", ".cpp", ".bzl", ".bazel", ".cmake.in", "CMakeLists.txt", "setup", "lib.sh"});
  const std::regex name("(?:tessera::|torch::|at::|std::)*[A-Za-z_][A-Za-z_0-9]{3,}(?:\\(\\))?");
  for (const Page& page : tessera::testing::read_pages(root())) {
    if (!is_compiled(page) || page.path == "docs/operators.md") continue;  // these are LibTorch's names
    for (const std::string& span : our_spans(page)) {
      if (!std::regex_match(span, name)) continue;
      std::string last = span.substr(span.rfind(':') == std::string::npos ? 0 : span.rfind(':') + 1);
      last = last.substr(0, last.find('('));
      const std::string message = page.path + " names " + span + ", which no source has";
      CHECK_MESSAGE(any_contains(sources, last), message);
    }
  }
}
