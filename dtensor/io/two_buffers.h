#pragma once

#include <array>
#include <cstdint>
#include <functional>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>

namespace tessera {

// Holds two buffers in the host's memory, through which bytes go between a file and a device: while one is copied, the
// other is filled or written. Their memory is pinned where the device is a GPU, whose copies then need no further one.
class TwoBuffers {
 public:
  // Waits until a copy has been made. It is called once.
  using Wait = std::function<void()>;
  // Starts a copy between `chunk`, bytes of a buffer, and the device's bytes at `position`.
  using StartCopy = c10::function_ref<Wait(const at::Tensor& chunk, int64_t position)>;
  // Reads `count` bytes of a file at `position`.
  using Fill = c10::function_ref<void(char* to, int64_t position, int64_t count)>;
  // Writes `count` bytes to a file; they come in order.
  using Use = c10::function_ref<void(const char* from, int64_t position, int64_t count)>;

  // Makes buffers of `bytes` each, at least 1.
  TwoBuffers(int64_t bytes, c10::Device device);

  // Fills buffers and copies them to the device. A buffer is not filled before its last copy has been made; all copies
  // have been made when this returns, also by an exception, which is that of the function that threw it.
  void send(int64_t total, Fill fill, StartCopy start_copy);
  // Copies from the device to buffers and uses these. A buffer is not copied to before it has been used.
  void fetch(int64_t total, StartCopy start_copy, Use use);

 private:
  at::Tensor chunk(int64_t index, int64_t total) const;

  int64_t bytes_;
  std::array<at::Tensor, 2> buffers_;
};

// Is the size of each buffer that the two functions below use for larger tensors.
inline constexpr int64_t kBufferBytes = int64_t{16} << 20;

// Makes a flat tensor of `bytes` on a device other than the CPU. What `fill` writes is copied to it on a stream of its
// own while the next bytes are read. Throws what `fill` throws.
at::Tensor read_to_device(int64_t bytes, c10::Device device, TwoBuffers::Fill fill);
// Gives the bytes of the contiguous `tensor`, which is on such a device, to `use`, while the next ones are copied.
void write_from_device(const at::Tensor& tensor, TwoBuffers::Use use);

}  // namespace tessera
