// Checks that no code has an identifier of retired_names.txt, and no C++ file its stem.
#include <cctype>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/tests/ground/source_tree.h"

namespace {

namespace fs = std::filesystem;

struct Retired {
  std::set<std::string> identifiers;
  std::set<std::string> stems;
};

// Reads one name per line: "NAME.h" stands for a stem, any other name for an identifier and a stem; '#' starts a
// comment.
Retired parse_retired(const std::string& text) {
  Retired out;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line.front() == '#') continue;
    if (line.ends_with(".h")) {
      out.stems.insert(line.substr(0, line.size() - 2));
    } else {
      out.identifiers.insert(line);
      out.stems.insert(line);
    }
  }
  return out;
}

bool in_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

// Returns the end of what begins at `begin` and ends with `close`; the end of the source if `close` is missing.
std::size_t behind(std::string_view source, std::string_view close, std::size_t begin) {
  const std::size_t found = source.find(close, begin);
  return found == std::string_view::npos ? source.size() : found + close.size();
}

std::size_t behind_literal(std::string_view source, std::size_t begin) {
  const char quote = source[begin];
  std::size_t i = begin + 1;
  while (i < source.size() && source[i] != quote && source[i] != '\n') i += source[i] == '\\' ? 2 : 1;
  return i + 1;
}

std::size_t behind_raw_string(std::string_view source, std::size_t quote) {
  const std::size_t open = source.find('(', quote);
  if (open == std::string_view::npos) return source.size();
  const std::string close = ")" + std::string(source.substr(quote + 1, open - quote - 1)) + "\"";
  return behind(source, close, open);
}

// Returns the end of the comment, literal or include line that begins at `i`, or `i` where none does.
std::size_t behind_skipped(std::string_view source, std::size_t i) {
  const bool after_word = i > 0 && in_word(source[i - 1]);
  if (source.substr(i, 2) == "//")
    return source.find('\n', i) == std::string_view::npos ? source.size() : source.find('\n', i);
  if (source.substr(i, 2) == "/*") return behind(source, "*/", i + 2);
  if (source.substr(i, 2) == "R\"" && !after_word) return behind_raw_string(source, i + 1);
  if (source[i] == '"') return behind_literal(source, i);
  if (source[i] == '\'' && !after_word) return behind_literal(source, i);  // not between digits, as in 1'000
  if (source[i] == '#' && source.substr(i, 8) == "#include") return behind(source, "\n", i);
  return i;
}

// Returns the code of a source, with a blank in the place of each comment, literal and include line.
std::string code_of(std::string_view source) {
  std::string out;
  for (std::size_t i = 0; i < source.size();) {
    const std::size_t end = behind_skipped(source, i);
    if (end > i) {
      out += ' ';
      i = end;
    } else {
      out += source[i++];
    }
  }
  return out;
}

// Returns the identifiers of `code`, without those after torch::, at:: or c10::, which are LibTorch's.
std::set<std::string> identifiers_in(const std::string& code) {
  std::set<std::string> out;
  bool foreign = false;  // whether the name continues one of LibTorch's namespaces
  for (std::size_t i = 0; i < code.size();) {
    if (!in_word(code[i])) {
      const bool joins = code.compare(i, 2, "::") == 0;
      foreign = foreign && joins;
      i += joins ? 2 : 1;
      continue;
    }
    std::size_t end = i;
    while (end < code.size() && in_word(code[end])) ++end;
    const std::string word = code.substr(i, end - i);
    if (!foreign) out.insert(word);
    const bool opens = code.compare(end, 2, "::") == 0;
    foreign = opens && (foreign || word == "torch" || word == "at" || word == "c10");
    i = end;
  }
  return out;
}

std::vector<std::string> retired_in(const std::string& source, const Retired& retired) {
  std::vector<std::string> out;
  for (const std::string& name : identifiers_in(code_of(source))) {
    if (retired.identifiers.contains(name)) out.push_back(name);
  }
  return out;
}

std::string stem_of(const fs::path& file) {
  const std::string name = file.filename().string();
  return name.substr(0, name.find('.'));
}

std::string read_file(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

TEST_CASE("retired names: a planted one is found in code alone") {
  const Retired retired = parse_retired("# a comment\nplanted\nfolder.h\n");
  CHECK(retired.identifiers == std::set<std::string>{"planted"});
  CHECK(retired.stems == std::set<std::string>{"planted", "folder"});
  struct Row {
    const char* why;
    std::string source;
    bool found;
  };
  const std::vector<Row> rows = {
      {"a variable", "int planted = 0;", true},
      {"a member", "x.planted();", true},
      {"behind another namespace", "tessera::planted(x);", true},
      {"behind the global namespace", "::planted(x);", true},
      {"behind a comment", "/* a */ planted(); // b", true},
      {"behind digits with a separator", "int n = 1'000; int planted = 2'000;", true},
      {"behind a literal with an escaped quote", R"(f("\""); planted();)", true},
      {"behind a quote as a character", "f('\"'); planted(); f('\"');", true},
      {"in a macro", "#define X planted", true},
      {"as LibTorch's argument", "at::add(planted, x)", true},
      {"behind a raw string", "f(R\"a(\")a\"); planted();", true},
      {"part of a longer name", "int planted_ = 0, replanted = 0, planted2 = 0;", false},
      {"other letters", "int Planted = 0;", false},
      {"in a comment", "// planted", false},
      {"in a comment of several lines", "/* a\nplanted */", false},
      {"in a string", R"(f("planted");)", false},
      {"in a string behind an escaped quote", R"(f("\" planted");)", false},
      {"in a raw string", "f(R\"x(planted \" planted)x\");", false},
      {"in an include line", "#include <a/planted.h>\n", false},
      {"behind torch::", "torch::planted(x);", false},
      {"behind at::", "at::planted(x);", false},
      {"behind c10::", "c10::planted x;", false},
      {"deep in LibTorch", "torch::nn::functional::planted(x);", false},
      {"a stem alone", "int folder = 0;", false},
  };
  for (const Row& row : rows) {
    CAPTURE(row.why);
    CHECK(retired_in(row.source, retired).empty() == !row.found);
  }
  CHECK(stem_of("a/b/planted.pb.h") == "planted");
}

TEST_CASE("retired names: no code and no C++ file has one") {
  const fs::path root = tessera::testing::source_root();
  const Retired retired = parse_retired(read_file(root / "tests/ground/retired_names.txt"));
  CHECK(retired.identifiers.size() > 20);
  const std::vector<fs::path> files = tessera::testing::files_below(root, {".h", ".cpp"});
  CHECK(files.size() > 10);
  for (const fs::path& file : files) {
    for (const std::string& name : retired_in(read_file(root / file), retired)) {
      FAIL_CHECK(file.string() << " uses " << name << ", a name of tests/ground/retired_names.txt");
    }
    if (retired.stems.contains(stem_of(file)))
      FAIL_CHECK(file.string() << " has a name of tests/ground/retired_names.txt");
  }
}
