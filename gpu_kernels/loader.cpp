#include "tessera/gpu_kernels/loader.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <optional>

namespace tessera::gpu {
namespace {

// Says why the library at the path that the user gave, or of its usual name, is not used.
void complain(const char* path, const char* why) {
  std::fprintf(stderr, "[tessera] %s%s; LibTorch's kernels and the host do the work\n", path, why);
}

// Sets `function` to what the library has under that name, and says whether there is such a function.
template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

// The library stays loaded until the process ends.
std::optional<Kernels> load() {
  const char* const chosen = std::getenv("TESSERA_GPU_KERNELS");
  if (chosen != nullptr && *chosen == '\0') return std::nullopt;
  void* const library = dlopen(chosen != nullptr ? chosen : "libtessera_gpu.so", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    if (chosen != nullptr) {
      complain("TESSERA_GPU_KERNELS: ", dlerror());
    } else {
      std::fprintf(
          stderr,
          "[tessera] libtessera_gpu.so was not loaded (%s): random numbers are drawn on the host and copied, and "
          "LibTorch's operators do the rest. Build //gpu_kernels:tessera_gpu with --config=cuda and set "
          "TESSERA_GPU_KERNELS to its path; TESSERA_GPU_KERNELS= says that this is wanted\n",
          dlerror());
    }
    return std::nullopt;
  }
  Kernels found{};
  decltype(&tessera_gpu_interface_version) version = nullptr;
  if (find(library, "tessera_gpu_interface_version", version) && version() == kInterfaceVersion &&
      find(library, "tessera_gpu_draw", found.draw) && find(library, "tessera_gpu_dropout", found.dropout) &&
      find(library, "tessera_gpu_logit_sums", found.logit_sums) &&
      find(library, "tessera_gpu_logit_terms", found.logit_terms) &&
      find(library, "tessera_gpu_logit_losses", found.logit_losses) &&
      find(library, "tessera_gpu_logit_gradient", found.logit_gradient) &&
      find(library, "tessera_gpu_masked_rows", found.masked_rows) && find(library, "tessera_gpu_copy", found.copy)) {
    return found;
  }
  complain(chosen != nullptr ? chosen : "the libtessera_gpu.so that was found", " is of another version");
  return std::nullopt;
}

}  // namespace

const Kernels* kernels() {
  static const std::optional<Kernels> found = load();
  return found ? &*found : nullptr;
}

}  // namespace tessera::gpu
