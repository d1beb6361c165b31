#pragma once

#include <filesystem>
#include <string>
#include <vector>

// Reads the pages of documentation as text, to compare them with the tree.
namespace tessera::testing {

struct Block {
  std::string language;  // "cpp", "text", "sh", ...
  std::string text;
};

struct Page {
  std::string path;  // from the root of the repository
  std::string text;
  std::vector<Block> blocks;       // fenced code
  std::string prose;               // the text outside blocks
  std::vector<std::string> spans;  // `inline code`, outside blocks
};

std::string read_file(const std::filesystem::path& path);
// Reads README.md and every .md file of docs/.
std::vector<Page> read_pages(const std::filesystem::path& root);
Page parse_page(std::string path, std::string text);

// Returns every match of the first group of `pattern`, or of the whole pattern when it has no group.
std::vector<std::string> all_matches(const std::string& text, const std::string& pattern);
std::vector<std::string> lines_of(const std::string& text);
// Returns the text without white space, to compare code that is indented or broken differently.
std::string squeezed(const std::string& text);

}  // namespace tessera::testing
