#include "tessera/tests/harness/report_file.h"

#include <fstream>
#include <iterator>
#include <stdexcept>

namespace tessera::testing {

void write_report_file(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text << std::flush;
  if (!file) throw std::runtime_error(path + " cannot be written; is the disk full?");
}

std::optional<std::string> read_report_file(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

}  // namespace tessera::testing
