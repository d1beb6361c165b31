#pragma once

#include <string>
#include <string_view>

namespace embed {

// Returns the code points of UTF-8 text. Each byte of a sequence that is not UTF-8 (over-long, a surrogate, cut off)
// becomes U+FFFD.
std::u32string decode_utf8(std::string_view bytes);

std::string encode_utf8(std::u32string_view text);

}  // namespace embed
