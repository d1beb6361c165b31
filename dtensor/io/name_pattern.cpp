#include "tessera/dtensor/io/name_pattern.h"

#include <algorithm>

namespace tessera {
namespace {

bool is_wildcard(char c) { return c == '*' || c == '?'; }

// Describes the last `*` that a match has met: its place in the pattern, and the range of the name that it stands for.
struct Star {
  std::size_t place;
  std::size_t begin;
  std::size_t end;
};

// Matches from left to right, and calls `stands_for(wildcard, begin, end)` with the place in the pattern of each
// wildcard and its range of the name; a later call for a place replaces an earlier one. Where the rest does not match,
// only the last `*` takes a character more: what comes before it has matched as early as it can, so that with longer
// ones there the rest could match no better.
template <class StandsFor>
bool match(std::string_view pattern, std::string_view name, const StandsFor& stands_for) {
  std::optional<Star> last;
  std::size_t p = 0, n = 0;
  while (p < pattern.size() || n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      last = Star{.place = p, .begin = n, .end = n};
      stands_for(p, n, n);
      ++p;
    } else if (p < pattern.size() && n < name.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      if (pattern[p] == '?') stands_for(p, n, n + 1);
      ++p;
      ++n;
    } else if (last && last->end < name.size()) {
      stands_for(last->place, last->begin, ++last->end);
      p = last->place + 1;
      n = last->end;
    } else {
      return false;
    }
  }
  return true;
}

}  // namespace

bool matches(std::string_view pattern, std::string_view name) {
  return match(pattern, name, [](std::size_t, std::size_t, std::size_t) {});
}

std::optional<std::vector<std::string>> captures(std::string_view pattern, std::string_view name) {
  std::vector<std::string_view> parts(pattern.size());  // by the places of the wildcards
  const auto note = [&](std::size_t place, std::size_t begin, std::size_t end) {
    parts[place] = name.substr(begin, end - begin);
  };
  if (!match(pattern, name, note)) return std::nullopt;
  std::vector<std::string> captured;
  for (std::size_t place = 0; place < pattern.size(); ++place) {
    if (is_wildcard(pattern[place])) captured.emplace_back(parts[place]);
  }
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
