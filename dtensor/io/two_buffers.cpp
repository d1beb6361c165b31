#include "tessera/dtensor/io/two_buffers.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include "tessera/mesh/core/logger.h"
#include "tessera/mesh/core/stream_point.h"
#include "tessera/mesh/core/wire.h"

namespace tessera {
namespace {

// Holds the wait for the copy that uses a buffer, and waits before the buffer can be freed.
class Copying {
 public:
  Copying() = default;
  Copying(const Copying&) = delete;
  Copying& operator=(const Copying&) = delete;
  ~Copying() {
    try {
      wait();
    } catch (const std::exception& error) {
      logger().debug("a copy whose caller has thrown: {}", error.what());
    }
  }
  void begin(TwoBuffers::Wait wait) { wait_ = std::move(wait); }
  void wait() {
    if (const TwoBuffers::Wait wait = std::exchange(wait_, {})) wait();
  }

 private:
  TwoBuffers::Wait wait_;
};

// Starts a copy on the calling thread's current stream.
TwoBuffers::Wait start_copy(const at::Tensor& to, const at::Tensor& from, c10::Device device) {
  to.copy_(from, /*non_blocking=*/true);
  return [point = StreamPoint::here(device)] { point.finish(); };
}

}  // namespace

TwoBuffers::TwoBuffers(int64_t bytes, c10::Device device) : bytes_(bytes) {
  if (bytes < 1) throw std::invalid_argument(fmt::format("TwoBuffers: {} bytes; give at least 1", bytes));
  const at::TensorOptions options = at::TensorOptions().dtype(at::kByte).pinned_memory(device.is_cuda());
  for (at::Tensor& buffer : buffers_) buffer = at::empty({bytes}, options);
}

at::Tensor TwoBuffers::chunk(int64_t index, int64_t total) const {
  return buffers_[static_cast<std::size_t>(index % 2)].narrow(0, 0, std::min(total - index * bytes_, bytes_));
}

void TwoBuffers::send(int64_t total, Fill fill, StartCopy start_copy) {
  std::array<Copying, 2> copying;
  for (int64_t i = 0; i * bytes_ < total; ++i) {
    Copying& last = copying[static_cast<std::size_t>(i % 2)];
    last.wait();
    const at::Tensor part = chunk(i, total);
    fill(static_cast<char*>(part.mutable_data_ptr()), i * bytes_, part.numel());
    last.begin(start_copy(part, i * bytes_));
  }
  for (Copying& each : copying) each.wait();
}

void TwoBuffers::fetch(int64_t total, StartCopy start_copy, Use use) {
  std::array<Copying, 2> copying;
  const auto begin = [&](int64_t i) {
    if (i * bytes_ < total) copying[static_cast<std::size_t>(i % 2)].begin(start_copy(chunk(i, total), i * bytes_));
  };
  begin(0);
  for (int64_t i = 0; i * bytes_ < total; ++i) {
    begin(i + 1);
    copying[static_cast<std::size_t>(i % 2)].wait();
    const at::Tensor part = chunk(i, total);
    use(static_cast<const char*>(part.const_data_ptr()), i * bytes_, part.numel());
  }
}

at::Tensor read_to_device(int64_t bytes, c10::Device device, TwoBuffers::Fill fill) {
  at::Tensor result = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  if (bytes == 0) return result;
  TwoBuffers buffers(std::min(bytes, kBufferBytes), device);
  const SideStream stream(device);
  buffers.send(bytes, fill, [&](const at::Tensor& chunk, int64_t position) {
    return start_copy(result.narrow(0, position, chunk.numel()), chunk, device);
  });
  return result;
}

void write_from_device(const at::Tensor& tensor, TwoBuffers::Use use) {
  const at::Tensor bytes = as_bytes(tensor);
  if (bytes.numel() == 0) return;
  TwoBuffers buffers(std::min(bytes.numel(), kBufferBytes), tensor.device());
  const SideStream stream(tensor.device());
  buffers.fetch(
      bytes.numel(),
      [&](const at::Tensor& chunk, int64_t position) {
        return start_copy(chunk, bytes.narrow(0, position, chunk.numel()), tensor.device());
      },
      use);
}

}  // namespace tessera
