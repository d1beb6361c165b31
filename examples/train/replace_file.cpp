#include "tessera/examples/train/replace_file.h"

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <system_error>

#include <fmt/format.h>

namespace train {

void replace_file(const std::string& path, const std::string& text) {
  const std::string part = path + ".new";
  std::ofstream file(part, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(part, path, error);
  if (file && !error) return;
  throw std::runtime_error(fmt::format("cannot write '{}'{}", path, error ? fmt::format(": {}", error.message()) : ""));
}

}  // namespace train
