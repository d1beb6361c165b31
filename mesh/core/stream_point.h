#pragma once

#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/StreamGuard.h>

namespace tessera {

// A StreamPoint marks how far the calling thread has given work to its current stream of a device, so that another
// stream can wait for that work. Neither marking nor waiting blocks the host. On the CPU nothing is queued: all of this
// does nothing. Copies share one mark.
class StreamPoint {
 public:
  StreamPoint() = default;
  static StreamPoint here(c10::Device device);

  // Makes the calling thread's current stream of the device wait for the marked work, unless that is the stream of the
  // mark, which does so by itself.
  void wait() const;
  // When `tensor`'s memory is freed, keeps it from being given out again before the calling thread's current stream has
  // done the work that it has been given by then. Needed where that stream is not the mark's.
  void keep(const at::Tensor& tensor) const;
  // Blocks the host until the marked work is done.
  void finish() const;

 private:
  friend class StreamOfPoint;
  struct Mark;
  explicit StreamPoint(std::shared_ptr<const Mark> mark) : mark_(std::move(mark)) {}

  std::shared_ptr<const Mark> mark_;  // null on the CPU
};

// While it lives, the calling thread gives its work to the stream of the mark, wherever the mark stands in it. On the
// CPU it does nothing.
class StreamOfPoint {
 public:
  explicit StreamOfPoint(const StreamPoint& point);
  StreamOfPoint(const StreamOfPoint&) = delete;
  StreamOfPoint& operator=(const StreamOfPoint&) = delete;

 private:
  std::optional<c10::StreamGuard> guard_;  // empty on the CPU
};

// While it lives, the calling thread gives its work for the device to a stream of LibTorch's pool, which waits for what
// the thread had queued before. Whoever makes one waits for that work (StreamPoint::finish) before its end. On the CPU
// it does nothing.
class SideStream {
 public:
  explicit SideStream(c10::Device device);
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

 private:
  std::optional<c10::StreamGuard> guard_;  // empty on the CPU
};

}  // namespace tessera
