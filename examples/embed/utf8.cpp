#include "tessera/examples/embed/utf8.h"

#include <cstddef>
#include <cstdint>
#include <optional>

namespace embed {
namespace {

constexpr char32_t kInvalid = 0xFFFD;

// Returns the number of bytes of a sequence that starts with `lead`, or 0 if none can start with it.
std::size_t sequence_length(uint8_t lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead < 0xE0) return 2;
  if (lead >= 0xE0 && lead < 0xF0) return 3;
  if (lead >= 0xF0 && lead < 0xF5) return 4;
  return 0;
}

bool is_legal(char32_t code, std::size_t length) {
  if (length == 3) return code >= 0x800 && (code < 0xD800 || code > 0xDFFF);
  if (length == 4) return code >= 0x10000 && code <= 0x10FFFF;
  return true;
}

// Returns the code point of the first `length` bytes, or nullopt if they are not one.
std::optional<char32_t> decode_one(std::string_view bytes, std::size_t length) {
  if (length == 0 || length > bytes.size()) return std::nullopt;
  const auto lead = static_cast<uint8_t>(bytes[0]);
  char32_t code = length == 1 ? lead : lead & (0xFFU >> (length + 1));
  for (std::size_t i = 1; i < length; ++i) {
    const auto next = static_cast<uint8_t>(bytes[i]);
    if ((next & 0xC0U) != 0x80U) return std::nullopt;
    code = code << 6U | (next & 0x3FU);
  }
  return is_legal(code, length) ? std::optional(code) : std::nullopt;
}

void append_utf8(std::string& out, char32_t code) {
  const auto tail = [&](unsigned shift) { out += static_cast<char>(0x80U | (code >> shift & 0x3FU)); };
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else if (code < 0x800) {
    out += static_cast<char>(0xC0U | code >> 6U);
    tail(0);
  } else if (code < 0x10000) {
    out += static_cast<char>(0xE0U | code >> 12U);
    tail(6), tail(0);
  } else {
    out += static_cast<char>(0xF0U | code >> 18U);
    tail(12), tail(6), tail(0);
  }
}

}  // namespace

std::u32string decode_utf8(std::string_view bytes) {
  std::u32string text;
  text.reserve(bytes.size());
  while (!bytes.empty()) {
    const std::size_t length = sequence_length(static_cast<uint8_t>(bytes[0]));
    const std::optional<char32_t> code = decode_one(bytes, length);
    text += code.value_or(kInvalid);
    bytes.remove_prefix(code ? length : 1);
  }
  return text;
}

std::string encode_utf8(std::u32string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char32_t code : text) append_utf8(out, code);
  return out;
}

}  // namespace embed
