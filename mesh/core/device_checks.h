#pragma once

#include <ATen/core/Tensor.h>

namespace tessera {

// Checks of values that need the host to wait are left to the GPU where the values are there: LibTorch's own kernels do
// so with indices. A check that fails there ends this process's use of the GPU: the next call that waits for it throws.

// Says whether the values of `t` are on a device whose work is queued.
inline bool is_queued(const at::Tensor& t) { return !t.is_cpu() && !t.is_meta(); }
// Makes the GPU check that every element of `holds` is true. `text` says what is wrong otherwise. Does not wait.
void check_on_device(const at::Tensor& holds, const char* text);

}  // namespace tessera
