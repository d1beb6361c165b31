// Tests two buffers with copies that another thread makes slowly, as a GPU's would be.

#include <chrono>
#include <cstring>
#include <future>
#include <map>
#include <stdexcept>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/io/two_buffers.h"

namespace {

using namespace tessera;

std::vector<char> numbers(int64_t count) {
  std::vector<char> out(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<char>(i * 7 + 1);
  return out;
}

// Copies on threads of its own, which read and write the host's memory late. It notes which buffers are in use.
class SlowCopies {
 public:
  // `device` is the memory of the pretended device.
  explicit SlowCopies(std::vector<char>& device) : device_(device) {}

  TwoBuffers::Wait to_device(const at::Tensor& chunk, int64_t position) {
    return begin(chunk, [this, chunk, position] {
      std::memcpy(device_.data() + position, chunk.const_data_ptr(), chunk.nbytes());
    });
  }
  TwoBuffers::Wait from_device(const at::Tensor& chunk, int64_t position) {
    return begin(chunk, [this, chunk, position] {
      std::memcpy(chunk.mutable_data_ptr(), device_.data() + position, chunk.nbytes());
    });
  }
  bool in_use(const void* buffer) const { return in_use_.contains(buffer); }
  std::size_t most_at_once() const { return most_; }
  std::size_t running() const { return in_use_.size(); }

 private:
  template <class Copy>
  TwoBuffers::Wait begin(const at::Tensor& chunk, const Copy& copy) {
    const void* const buffer = chunk.const_data_ptr();
    CHECK_FALSE(in_use(buffer));
    std::shared_future<void> done = std::async(std::launch::async, [copy] {
                                      std::this_thread::sleep_for(std::chrono::milliseconds(2));
                                      copy();
                                    }).share();
    in_use_.emplace(buffer, done);
    most_ = std::max(most_, in_use_.size());
    return [this, buffer, done] {
      in_use_.erase(buffer);
      done.get();
    };
  }

  std::vector<char>& device_;
  std::map<const void*, std::shared_future<void>> in_use_;
  std::size_t most_ = 0;
};

}  // namespace

TEST_CASE("two buffers to a device: the values arrive, and no buffer is filled while it is copied") {
  for (const int64_t total : {0, 1, 9, 10, 11, 20, 25, 100}) {
    CAPTURE(total);
    const std::vector<char> file = numbers(total);
    std::vector<char> device(file.size(), 0);
    SlowCopies copies(device);
    TwoBuffers buffers(10, at::kCPU);
    int64_t filled = 0;
    buffers.send(
        total,
        [&](char* to, int64_t position, int64_t count) {
          CHECK_FALSE(copies.in_use(to));
          CHECK(position == filled);
          CHECK(count <= 10);
          std::memcpy(to, file.data() + position, static_cast<std::size_t>(count));
          filled += count;
        },
        [&](const at::Tensor& chunk, int64_t position) { return copies.to_device(chunk, position); });
    CHECK(device == file);
    CHECK(copies.running() == 0);
    if (total > 10) CHECK(copies.most_at_once() == 2);
  }
}

TEST_CASE("two buffers from a device: the values arrive in order while the next ones are copied") {
  for (const int64_t total : {0, 1, 9, 10, 11, 20, 25, 100}) {
    CAPTURE(total);
    std::vector<char> device = numbers(total), file;
    SlowCopies copies(device);
    TwoBuffers buffers(10, at::kCPU);
    buffers.fetch(
        total, [&](const at::Tensor& chunk, int64_t position) { return copies.from_device(chunk, position); },
        [&](const char* from, int64_t position, int64_t count) {
          CHECK_FALSE(copies.in_use(from));
          CHECK(position == static_cast<int64_t>(file.size()));
          CHECK(copies.running() == (position + count < total ? 1 : 0));
          file.insert(file.end(), from, from + count);
        });
    CHECK(file == device);
    CHECK(copies.running() == 0);
  }
}

TEST_CASE("an error while a buffer is filled, copied or used reaches the caller, when no copy is left") {
  std::vector<char> device(100);
  SlowCopies copies(device);
  TwoBuffers buffers(10, at::kCPU);
  const auto to_device = [&](const at::Tensor& chunk, int64_t position) { return copies.to_device(chunk, position); };
  const auto unreadable = [](char*, int64_t position, int64_t) {
    if (position == 30) throw std::runtime_error("the file ends before byte 30");
  };
  CHECK_THROWS_WITH_AS(buffers.send(100, unreadable, to_device), "the file ends before byte 30", std::runtime_error);
  CHECK(copies.running() == 0);
  const auto full_disk = [](const char*, int64_t position, int64_t) {
    if (position == 20) throw std::runtime_error("no space left");
  };
  const auto from_device = [&](const at::Tensor& chunk, int64_t at) { return copies.from_device(chunk, at); };
  CHECK_THROWS_WITH_AS(buffers.fetch(100, from_device, full_disk), "no space left", std::runtime_error);
  CHECK(copies.running() == 0);
  const auto lost_device = [&](const at::Tensor& chunk, int64_t position) -> TwoBuffers::Wait {
    if (position < 50) return copies.to_device(chunk, position);
    return [] { throw std::runtime_error("the device is lost"); };
  };
  CHECK_THROWS_WITH_AS(buffers.send(
                           100, [](char*, int64_t, int64_t) {}, lost_device),
                       "the device is lost", std::runtime_error);
  CHECK(copies.running() == 0);
  CHECK_THROWS_WITH_AS(TwoBuffers(0, at::kCPU), doctest::Contains("0 bytes"), std::invalid_argument);
}
