#include "tessera/tests/fuzz/kept_inputs.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <stdexcept>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace tessera::fuzz {
namespace {

// Writes each byte above 127 as the two bytes that UTF-8 has for its code point, as JSON needs.
std::string as_text(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<uint8_t>(c);
    if (byte < 0x80) {
      text += c;
    } else {
      text += static_cast<char>(0xC0 | (byte >> 6));
      text += static_cast<char>(0x80 | (byte & 0x3F));
    }
  }
  return text;
}

std::string as_bytes(const std::string& text) {
  std::string bytes;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto first = static_cast<uint8_t>(text[i]);
    if (first < 0x80) {
      bytes += text[i];
    } else if (first <= 0xC3 && i + 1 < text.size()) {
      bytes += static_cast<char>((first << 6) | (static_cast<uint8_t>(text[++i]) & 0x3F));
    } else {
      throw std::runtime_error(fmt::format("'{}' has a code point above 255", text));
    }
  }
  return bytes;
}

}  // namespace

std::string kept_file(const std::string& subject) { return fmt::format("tests/fuzz/corpus/{}.jsonl", subject); }

std::vector<std::string> read_inputs(const std::string& file) {
  std::ifstream in(file);
  if (!in) throw std::runtime_error(fmt::format("{} cannot be read", file));
  std::vector<std::string> inputs;
  for (std::string line; std::getline(in, line);) {
    const nlohmann::json value = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!value.is_string()) {
      throw std::runtime_error(fmt::format("line {} of {} is not a JSON string: {}", inputs.size() + 1, file, line));
    }
    inputs.push_back(as_bytes(value.get<std::string>()));
  }
  return inputs;
}

void write_inputs(const std::string& file, std::vector<std::string> inputs) {
  std::sort(inputs.begin(), inputs.end());
  std::ofstream out(file);
  for (const std::string& input : inputs)
    out << nlohmann::json(as_text(input)).dump(-1, ' ', /*ensure_ascii=*/true) << '\n';
  out.close();
  if (!out) throw std::runtime_error(fmt::format("{} cannot be written", file));
}

}  // namespace tessera::fuzz
