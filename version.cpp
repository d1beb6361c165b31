#include "tessera/version.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include <torch/headeronly/version.h>

// LibTorch's own function: it has the loaded library's version in its three upper bytes. LibTorch has it since 2.7.
extern "C" __attribute__((weak)) uint64_t aoti_torch_abi_version();

namespace tessera {
namespace {

unsigned byte_of(uint64_t version, int shift) { return static_cast<unsigned>(version >> shift) & 0xff; }

// Runs before the library's other initializers, which register kernels with LibTorch. Nothing can catch an exception
// there. The loader comes first: it ends the program where LibTorch lacks a variable or a type that the library uses.
__attribute__((constructor(101))) void check_libtorch() {
  char loaded[48] = "an older LibTorch";
  if (aoti_torch_abi_version != nullptr) {
    const uint64_t version = aoti_torch_abi_version();
    if (version >> 40 == TORCH_ABI_VERSION >> 40) return;
    std::snprintf(loaded, sizeof loaded, "LibTorch %u.%u.%u", byte_of(version, 56), byte_of(version, 48),
                  byte_of(version, 40));
  }
  std::fprintf(stderr,
               "tessera: libtessera was built with LibTorch %s, but %s is loaded; use that LibTorch, or build Tessera "
               "with this one\n",
               TORCH_VERSION, loaded);
  std::abort();
}

}  // namespace

const char* library_version() { return TESSERA_VERSION; }

const char* libtorch_version() { return TORCH_VERSION; }

}  // namespace tessera
