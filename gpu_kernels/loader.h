#pragma once

#include "tessera/gpu_kernels/interface.h"

namespace tessera::gpu {

// Returns the functions of libtessera_gpu.so, or null where that library cannot be loaded or belongs to another version
// of the interface. The first call looks for the library: at the path that the environment variable TESSERA_GPU_KERNELS
// gives, and says on stderr if that fails; without the variable by its name, along the program's rpath and
// LD_LIBRARY_PATH. Where the variable is empty it is not looked for. Every thread may call it.
const Kernels* kernels();

}  // namespace tessera::gpu
