#pragma once

#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include "tessera/mesh/core/stream_point.h"

namespace tessera {

// Brings work that comes on several streams of a device to one of them. While it lives, the calling thread gives its
// work to `first`, or to its own stream where `first` is empty, which then becomes `first`. That stream waits for what
// the thread's own has been given before; and when this ends, the thread's own waits for it. On the CPU, and where both
// are the same, it does nothing.
class OnFirstStream {
 public:
  OnFirstStream(std::optional<c10::Stream>& first, c10::Device device);
  ~OnFirstStream();
  OnFirstStream(const OnFirstStream&) = delete;
  OnFirstStream& operator=(const OnFirstStream&) = delete;

  // Keeps memory that the thread's own stream has taken, and that the first one uses.
  void keep(const at::Tensor& tensor) const { before_.keep(tensor); }

 private:
  const c10::Device device_;
  StreamPoint before_;  // of the thread's own stream; empty where nothing is done
  std::optional<c10::StreamGuard> guard_;
};

}  // namespace tessera
