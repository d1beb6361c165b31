#include "tessera/dtensor/io/name_pattern.h"

#include <algorithm>

namespace tessera {
namespace {

bool is_wildcard(char c) { return c == '*' || c == '?'; }

bool match(std::string_view pattern, std::string_view name, std::vector<std::string>& captured) {
  if (pattern.empty()) return name.empty();
  const std::string_view rest = pattern.substr(1);
  if (!is_wildcard(pattern.front())) {
    return !name.empty() && pattern.front() == name.front() && match(rest, name.substr(1), captured);
  }
  const std::size_t least = pattern.front() == '*' ? 0 : 1;
  const std::size_t most = pattern.front() == '*' ? name.size() : std::min<std::size_t>(1, name.size());
  for (std::size_t length = least; length <= most; ++length) {
    captured.emplace_back(name.substr(0, length));
    if (match(rest, name.substr(length), captured)) return true;
    captured.pop_back();
  }
  return false;
}

}  // namespace

std::optional<std::vector<std::string>> captures(std::string_view pattern, std::string_view name) {
  std::vector<std::string> captured;
  if (!match(pattern, name, captured)) return std::nullopt;
  return captured;
}

std::string filled(std::string_view pattern, const std::vector<std::string>& captured) {
  std::string name;
  std::size_t next = 0;
  for (const char c : pattern) {
    if (is_wildcard(c)) {
      name += captured.at(next++);
    } else {
      name += c;
    }
  }
  return name;
}

std::size_t wildcards(std::string_view pattern) {
  return static_cast<std::size_t>(std::ranges::count_if(pattern, is_wildcard));
}

}  // namespace tessera
