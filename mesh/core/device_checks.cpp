#include "tessera/mesh/core/device_checks.h"

#include <ATen/ops/_assert_async.h>

namespace tessera {

void check_on_device(const at::Tensor& holds, const char* text) { at::_assert_async(holds.all(), text); }

}  // namespace tessera
