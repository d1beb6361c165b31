#pragma once

#include <string>

namespace tessera::bench {

// Prints what the kernels of our own besides those of random numbers take on one device, beside LibTorch's operators
// for the same, and the time in which a copy, which is measured first, reads and writes as many bytes as they must. On
// the CPU, where LibTorch's operators do both, sizes are small.
void measure_kernels(const std::string& device, int rounds);

}  // namespace tessera::bench
