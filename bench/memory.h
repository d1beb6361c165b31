#pragma once

#include <cstdint>

namespace tessera::bench {

// Bytes that tensors on the CPU hold in this process, of all threads, from the first use on. LibTorch's allocator is
// the process's, so this is too; memory that other libraries take is not counted.
int64_t allocated_bytes();
// The most since the last restart_peak().
int64_t peak_bytes();
void restart_peak();

}  // namespace tessera::bench
