#pragma once

#include <cstdint>

namespace tessera::bench {

// Returns the bytes that CPU tensors of this process hold, in all threads. Tensors count that were made after the first
// call of one of these functions. Memory that other libraries allocate is not counted.
int64_t allocated_bytes();
// Returns the largest value since the last restart_peak().
int64_t peak_bytes();
void restart_peak();

}  // namespace tessera::bench
