#include "tessera/mesh/core/first_stream.h"

#include <exception>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "tessera/mesh/core/logger.h"

namespace tessera {

OnFirstStream::OnFirstStream(std::optional<c10::Stream>& first, c10::Device device) : device_(device) {
  if (device.is_cpu()) return;
  const c10::Stream own = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (!first) first = own;
  if (*first == own) return;
  before_ = StreamPoint::here(device);
  guard_.emplace(*first);
  before_.wait();
}

OnFirstStream::~OnFirstStream() {
  if (!guard_) return;
  try {
    const StreamPoint after = StreamPoint::here(device_);
    guard_.reset();
    after.wait();
  } catch (const std::exception& error) {
    logger().debug("a device that has failed: {}", error.what());  // its next call throws
  }
}

}  // namespace tessera
