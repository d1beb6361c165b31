#include "tessera/dtensor/io/strict_json.h"

#include <stdexcept>

#include <fmt/format.h>

namespace tessera {
namespace {

constexpr std::size_t kLongestShown = 120;

}  // namespace

std::string in_quotes(std::string_view text) {
  std::string shown;
  for (const char c : text.substr(0, kLongestShown)) {
    const auto byte = static_cast<unsigned char>(c);
    shown += byte < 0x20 || byte == 0x7f ? fmt::format("\\x{:02x}", byte) : std::string(1, c);
  }
  if (text.size() <= kLongestShown) return fmt::format("'{}'", shown);
  return fmt::format("'{}...' ({} bytes)", shown, text.size());
}

void StrictJson::parse(std::string_view text) {
  nlohmann::json::sax_parse(text.begin(), text.end(), this, nlohmann::json::input_format_t::json, /*strict=*/true);
}

bool StrictJson::parse_error(std::size_t position, const std::string& token, const nlohmann::json::exception&) {
  fail(fmt::format("not valid JSON at byte {}, near {}", position, in_quotes(token)));
}

void StrictJson::refuse(const std::string& what) const { fail(fmt::format("expected {}, found {}", expected(), what)); }

void StrictJson::fail(const std::string& what) const {
  throw std::invalid_argument(fmt::format("'{}': {}: {}", file_, where(), what));
}

}  // namespace tessera
