#pragma once

#include <string>

namespace tessera::bench {

// Prints what the kernels of our own besides those of random numbers take on one device, beside LibTorch's operators
// for the same, and the time that the bytes which must be read and written take at 3.0 TB/s. On the CPU, where
// LibTorch's operators do both, sizes are small.
void measure_kernels(const std::string& device, int rounds);

}  // namespace tessera::bench
