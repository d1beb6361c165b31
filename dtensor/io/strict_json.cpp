#include "tessera/dtensor/io/strict_json.h"

#include <set>
#include <stdexcept>
#include <vector>

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

nlohmann::json parse_unique_json(std::string_view text, std::size_t most_bytes, const std::string& file,
                                 const std::string& what) {
  using Event = nlohmann::json::parse_event_t;
  if (text.size() > most_bytes) {
    throw std::invalid_argument(
        fmt::format("'{}': {} has {} bytes; at most {} are read", file, what, text.size(), most_bytes));
  }
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto check_keys = [&](int, Event event, nlohmann::json& parsed) {
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(parsed.get<std::string>()).second) {
      throw std::invalid_argument(fmt::format("'{}': {}: the key {} appears twice", file, what,
                                              in_quotes(parsed.get_ref<const std::string&>())));
    }
    return true;
  };
  try {
    return nlohmann::json::parse(text, check_keys);
  } catch (const nlohmann::json::exception& error) {
    throw std::invalid_argument(fmt::format("'{}': {} is not valid JSON: {}", file, what, error.what()));
  }
}

}  // namespace tessera
