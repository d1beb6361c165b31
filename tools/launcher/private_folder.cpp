#include "tessera/tools/launcher/private_folder.h"

#include <stdlib.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <system_error>

#include <fmt/format.h>

namespace tessera {
namespace {

std::string parent_folder() {
  for (const char* name : {"TEST_TMPDIR", "TMPDIR"}) {
    const char* value = std::getenv(name);
    if (value != nullptr && *value != '\0') return value;
  }
  return "/tmp";
}

}  // namespace

PrivateFolder::PrivateFolder() : path_(parent_folder() + "/tessera-XXXXXX") {
  if (::mkdtemp(path_.data()) == nullptr) {
    throw std::runtime_error(fmt::format("no folder can be made in {} ({}); set TMPDIR to one that can be written",
                                         parent_folder(), std::strerror(errno)));
  }
}

PrivateFolder::~PrivateFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace tessera
