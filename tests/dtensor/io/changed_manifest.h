#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>

#include "tessera/dtensor/io/block_checksums.h"

namespace tessera {

// Returns the text of a state.json in which `from` has become `to`, with the checksum of what it says then.
inline std::string changed_manifest(const std::string& text, const std::string& from, const std::string& to) {
  std::string state = text.substr(31, text.size() - 33);
  const std::size_t at = state.find(from);
  if (at == std::string::npos) throw std::logic_error("the manifest has no " + from);
  state.replace(at, from.size(), to);
  char crc[9] = {};
  std::snprintf(crc, sizeof(crc), "%08x", crc32_of(state));
  return std::string("{\"crc32\": \"") + crc + "\", \"state\": " + state + "}\n";
}

}  // namespace tessera
