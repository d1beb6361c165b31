#include "tessera/gpu_kernels/loader.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

namespace tessera::gpu {
namespace {

// The library stays loaded until the process ends.
DrawFunction load() {
  const char* const chosen = std::getenv("TESSERA_GPU_KERNELS");
  const bool by_path = chosen != nullptr && *chosen != '\0';
  void* const library = dlopen(by_path ? chosen : "libtessera_gpu.so", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    if (by_path) std::fprintf(stderr, "[tessera] TESSERA_GPU_KERNELS: %s; the host draws\n", dlerror());
    return nullptr;
  }
  const auto version =
      reinterpret_cast<decltype(&tessera_gpu_interface_version)>(dlsym(library, "tessera_gpu_interface_version"));
  if (version == nullptr || version() != kInterfaceVersion) {
    if (by_path)
      std::fprintf(stderr, "[tessera] TESSERA_GPU_KERNELS: %s is of another version; the host draws\n", chosen);
    return nullptr;
  }
  return reinterpret_cast<DrawFunction>(dlsym(library, "tessera_gpu_draw"));
}

}  // namespace

DrawFunction draw_function() {
  static const DrawFunction found = load();
  return found;
}

}  // namespace tessera::gpu
