#pragma once

#include <string>

#include <fmt/format.h>

namespace train {

// Returns a text that a terminal and a page can show: all bytes but line feeds, tabs and printable ASCII are written as
// \x1b and so on. A model may write any byte.
inline std::string printable(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    const bool is_shown = c == '\n' || c == '\t' || (byte >= 0x20 && byte < 0x7f);
    out += is_shown ? std::string(1, c) : fmt::format("\\x{:02x}", byte);
  }
  return out;
}

}  // namespace train
