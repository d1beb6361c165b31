#pragma once

#include <c10/core/Device.h>

namespace tessera::bench {

// Prints how many bytes a second go from a safetensors file to `device` and back to a file, beside copies of the same
// size between pinned memory and the device. The file is in the memory of the system, which has just written it. On
// the CPU, whose reads end in the tensor itself, the size is smaller.
void measure_io(c10::Device device, int rounds);

}  // namespace tessera::bench
