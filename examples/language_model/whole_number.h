#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include <CLI/CLI.hpp>

// Reads a whole number of a command line: option->transform(whole_number(1)). CLI11 alone takes the zeros of "010", or
// of a folder's name such as step_00000100, for the sign of an octal number.
inline CLI::Validator whole_number(int64_t least = 0, int64_t most = int64_t{1} << 40) {
  const CLI::Range range(least, most);
  return CLI::Validator(
      [range](std::string& text) {
        if (text.find_first_not_of("0123456789") == std::string::npos)
          text.erase(0, std::min(text.find_first_not_of('0'), text.empty() ? 0 : text.size() - 1));
        return range(text);
      },
      range.get_description());
}
