#include "tessera/tests/coming_from/source_code.h"

#include <algorithm>
#include <cctype>
#include <regex>
#include <sstream>
#include <string_view>
#include <vector>

namespace tessera::testing {
namespace {

bool is_blank(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }
bool in_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

// Returns the end of the literal whose quote is at `begin`: the position after its other quote.
std::size_t end_of_literal(const std::string& code, std::size_t begin) {
  for (std::size_t i = begin + 1; i < code.size(); ++i) {
    if (code[i] == '\\') {
      ++i;
    } else if (code[i] == code[begin]) {
      return i + 1;
    }
  }
  return code.size();
}

// Says whether a quote begins a literal; between digits, as in 1'000, it does not.
bool begins_literal(const std::string& code, std::size_t i) {
  return code[i] == '"' || (code[i] == '\'' && (i == 0 || !in_word(code[i - 1])));
}

std::size_t end_of_comment(const std::string& code, std::size_t begin) {
  const bool line = code.compare(begin, 2, "//") == 0;
  const std::size_t end = line ? code.find('\n', begin) : code.find("*/", begin + 2);
  return end == std::string::npos ? code.size() : end + (line ? 0 : 2);
}

// Characters of literals have this bit; no character of code has it.
constexpr char kQuoted = '\x80';

// Returns code without comments and preprocessor lines, with literals marked; blanks stay.
std::string marked(const std::string& code) {
  std::string out;
  for (std::size_t i = 0; i < code.size();) {
    const bool line_begins =
        out.find_last_not_of(" \t") == std::string::npos || out[out.find_last_not_of(" \t")] == '\n';
    if (begins_literal(code, i)) {
      const std::size_t end = end_of_literal(code, i);
      out += code[i];
      for (++i; i + 1 < end; ++i) out += static_cast<char>(code[i] | kQuoted);
      if (i < end) out += code[i++];
    } else if (code.compare(i, 2, "//") == 0 || code.compare(i, 2, "/*") == 0) {
      i = end_of_comment(code, i);
    } else if (code[i] == '#' && line_begins) {
      i = std::min(code.find('\n', i), code.size());
    } else {
      out += code[i++];
    }
  }
  return out;
}

std::string without_blanks(const std::string& marked_code) {
  std::string out;
  for (const char c : marked_code) {
    const char plain = static_cast<char>(c & ~kQuoted);
    if (!is_blank(plain)) out += c;
  }
  return out;
}

// Marked code of a declaration outside of functions and classes.
struct Declaration {
  std::string name;  // the name; for a test case its text, bare and in quotes
  std::string code;
};

std::string name_of(const std::string& code) {
  std::smatch found;
  static const std::regex test_case("TEST_CASE\\s*\\(\\s*(\"[^\"]*\")"),
      type("^\\s*(struct|class|enum class|enum)\\s+(\\w+)"), last_word("(\\w+)\\s*(\\[[^\\]]*\\]\\s*)*$");
  if (std::regex_search(code, found, test_case)) return without_blanks(found[1]);
  if (std::regex_search(code, found, type)) return found[2];
  const std::string head = code.substr(0, code.find_first_of("(={;"));
  return std::regex_search(head, found, last_word) ? found[1].str() : "";
}

std::vector<Declaration> declarations_of(const std::string& source) {
  std::vector<Declaration> out;
  std::string open;
  int braces = 0, parentheses = 0;
  const std::string code = marked(source);
  for (std::size_t i = 0; i < code.size(); ++i) {
    const char c = code[i];
    open += c;
    parentheses += (c == '(') - (c == ')');
    if (parentheses > 0) continue;
    const bool outside = braces == 0;
    if (c == '{' && outside && open.find("namespace") < open.find_first_of("=(")) {
      open.clear();
    } else if (c == '}' && outside) {
      open.clear();  // of the namespace
    } else {
      braces += (c == '{') - (c == '}');
      const std::size_t next = code.find_first_not_of(" \t\n", i + 1);
      const bool body_ends = c == '}' && braces == 0 && (next == std::string::npos || code[next] != ';');
      if (!body_ends && !(c == ';' && braces == 0)) continue;
      out.push_back({.name = name_of(open), .code = open});
      open.clear();
    }
  }
  return out;
}

bool names(const std::string& code, const std::string& word) {
  for (std::size_t at = code.find(word); at != std::string::npos; at = code.find(word, at + 1)) {
    const bool begins = at == 0 || !in_word(code[at - 1]), ends = !in_word(code[at + word.size()]);
    if (begins && ends) return true;
  }
  return false;
}

}  // namespace

std::string bare(const std::string& code) { return without_blanks(marked(code)); }

std::string code_of_case(const std::string& source, const std::string& test_case) {
  std::vector<Declaration> others = declarations_of(source);
  const std::string wanted = bare('"' + test_case + '"');
  const auto found = std::ranges::find(others, wanted, &Declaration::name);
  if (found == others.end()) return "";
  std::string reached = found->code;
  std::erase_if(others, [](const Declaration& each) { return each.name.empty() || each.name.front() == '"'; });
  for (bool more = true; more;) {
    const auto rest = std::stable_partition(others.begin(), others.end(),
                                            [&](const Declaration& each) { return !names(reached, each.name); });
    more = rest != others.end();
    std::for_each(rest, others.end(), [&](const Declaration& each) { reached += '\n' + each.code; });
    others.erase(rest, others.end());
  }
  return without_blanks(reached);
}

}  // namespace tessera::testing
