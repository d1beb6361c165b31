// Is libFuzzer's target for the subject that FUZZ_SUBJECT names. With the argument --write-seeds FOLDER it only writes
// the subject's seeds there. tools/fuzz runs it.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "tessera/tests/fuzz/subjects.h"

namespace {

const tessera::fuzz::Subject& chosen() {
  const char* const name = std::getenv("FUZZ_SUBJECT");
  static const tessera::fuzz::Subject& only = tessera::fuzz::subject(name == nullptr ? "" : name);
  return only;
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  if (*argc != 3 || std::strcmp((*argv)[1], "--write-seeds") != 0) return 0;
  int i = 0;
  for (const std::string& seed : chosen().seeds) {
    std::ofstream(fmt::format("{}/seed{}", (*argv)[2], i++), std::ios::binary) << seed;
  }
  std::exit(0);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  tessera::fuzz::try_input(chosen(), std::string_view(reinterpret_cast<const char*>(data), size));
  return 0;
}
