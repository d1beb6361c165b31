#include "tessera/examples/train/replace_file.h"

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <system_error>

#include <fmt/format.h>

namespace train {

void replace_file(const std::string& path, const std::string& text) {
  const std::string part = path + ".new";
  errno = 0;
  std::ofstream file(part, std::ios::binary | std::ios::trunc);
  const bool is_open = file.is_open();
  file << text;
  file.close();
  const int failed = errno;
  std::error_code error;
  if (file) std::filesystem::rename(part, path, error);
  if (file && !error) return;
  std::error_code ignored;
  if (is_open) std::filesystem::remove(part, ignored);
  throw_not_written(path, file ? error.value() : failed);
}

void throw_not_written(const std::string& path, int error) {
  const std::string reason = error == 0 ? "" : ": " + std::generic_category().message(error);
  throw std::runtime_error(fmt::format("cannot write '{}'{}", path, reason));
}

}  // namespace train
