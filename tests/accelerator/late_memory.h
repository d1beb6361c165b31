#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

namespace tessera::testing {

// Memory that is fresh, or has been freed, holds this byte everywhere: a NaN as a floating-point number, -1 as a whole
// one.
inline constexpr unsigned char kPoison = 0xff;

// Keeps the memory from being poisoned, when it is freed, before `stream` has done the work that it has been given by
// then.
void keep_for_stream(const c10::DataPtr& memory, const c10::Stream& stream);

}  // namespace tessera::testing
