#include "tessera/dtensor/io/strict_json.h"

#include <set>
#include <stdexcept>
#include <vector>

#include <fmt/format.h>

namespace tessera {
namespace {

constexpr std::size_t kLongestShown = 120;
constexpr int kDeepest = 64;

// Returns where `text` has a zero byte, as a number from 1, or 0. No JSON has one, but nlohmann's reader takes it for
// the end of the text and would accept whatever follows it.
std::size_t zero_byte_of(std::string_view text) { return text.find('\0') + 1; }

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
  if (const std::size_t zero = zero_byte_of(text)) fail(fmt::format("not valid JSON at byte {}, a zero byte", zero));
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
  if (const std::size_t zero = zero_byte_of(text)) {
    throw std::invalid_argument(fmt::format("'{}': {} is not valid JSON: byte {} is zero", file, what, zero));
  }
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto check_keys = [&](int depth, Event event, nlohmann::json& parsed) {
    const bool opens = event == Event::object_start || event == Event::array_start;
    if (opens && depth >= kDeepest) {
      throw std::invalid_argument(
          fmt::format("'{}': {} has lists or objects in each other, more than {} deep", file, what, kDeepest));
    }
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
