// configure IN OUT ...: writes each template IN to OUT, with the versions of this build in the place of @NAME@. Names
// that follow "--", as NAME=VALUE, are replaced too.

#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>

#define DOCTEST_CONFIG_DISABLE  // only its version is used
#include <doctest/doctest.h>
#include <torch/headeronly/version.h>

#include "tessera/version.h"

namespace {

std::map<std::string, std::string> facts() {
  const std::string major = std::to_string(TESSERA_VERSION_MAJOR);
  const std::string minor = std::to_string(TESSERA_VERSION_MINOR);
  return {
      {"TESSERA_VERSION", TESSERA_VERSION},
      // Two versions that differ in this are incompatible: before 1.0 a new minor version may change anything.
      {"TESSERA_ABI_VERSION", TESSERA_VERSION_MAJOR == 0 ? major + "." + minor : major},
      {"LIBTORCH_VERSION", TORCH_VERSION},
      {"DOCTEST_VERSION", DOCTEST_VERSION_STR},
#ifdef USE_C10D_NCCL
      {"CUDA", "ON"},
      {"CUDA_LIBS", "-ltorch_cuda,-lc10_cuda,"},
#else
      {"CUDA", "OFF"},
      {"CUDA_LIBS", ""},
#endif
  };
}

std::string read_file(const char* path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error(std::string("cannot read ") + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

void replace(std::string& text, const std::string& from, const std::string& to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
    text.replace(at, from.size(), to);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::map<std::string, std::string> values = facts();
  int templates_end = 1;
  while (templates_end < argc && std::strcmp(argv[templates_end], "--") != 0) ++templates_end;
  for (int i = templates_end + 1; i < argc; ++i) {
    const std::string given = argv[i];
    const std::size_t equals = given.find('=');
    values[given.substr(0, equals)] = given.substr(equals + 1);
  }
  for (int i = 1; i + 1 < templates_end; i += 2) {
    std::string text = read_file(argv[i]);
    for (const auto& [name, value] : values) replace(text, "@" + name + "@", value);
    std::ofstream(argv[i + 1]) << text;
  }
}
