#include "tessera/tests/docs/pages.h"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <iterator>
#include <regex>
#include <sstream>

namespace tessera::testing {

namespace fs = std::filesystem;

std::string read_file(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<Page> read_pages(const fs::path& root) {
  std::vector<std::string> paths = {"README.md"};
  for (const fs::directory_entry& entry : fs::directory_iterator(root / "docs")) {
    if (entry.path().extension() == ".md") paths.push_back("docs/" + entry.path().filename().string());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<Page> pages;
  for (const std::string& path : paths) pages.push_back(parse_page(path, read_file(root / path)));
  return pages;
}

Page parse_page(std::string path, std::string text) {
  Page page{.path = std::move(path), .text = std::move(text), .blocks = {}, .prose = {}, .spans = {}};
  bool inside = false;
  for (const std::string& line : lines_of(page.text)) {
    if (line.starts_with("```")) {
      inside = !inside;
      if (inside) page.blocks.push_back({.language = line.substr(3), .text = {}});
    } else {
      (inside ? page.blocks.back().text : page.prose) += line + "\n";
    }
  }
  page.spans = all_matches(page.prose, "`([^`]+)`");
  return page;
}

std::vector<std::string> all_matches(const std::string& text, const std::string& pattern) {
  const std::regex regex(pattern);
  std::vector<std::string> found;
  for (auto it = std::sregex_iterator(text.begin(), text.end(), regex); it != std::sregex_iterator(); ++it) {
    found.push_back((*it)[it->size() > 1 ? 1 : 0]);
  }
  return found;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::string squeezed(const std::string& text) {
  std::string out;
  std::copy_if(text.begin(), text.end(), std::back_inserter(out), [](unsigned char c) { return std::isspace(c) == 0; });
  return out;
}

}  // namespace tessera::testing
