// Gives memory to the stand-in for an accelerator. A caching allocator of a GPU gives freed memory out again at once,
// to the stream for which it was allocated: what that stream does next may overwrite it, and no other stream may use it
// unless it was told of it. The worst case of that happens here always: the memory is poisoned on its stream, in the
// place where it was freed, and after that on each other stream that keep_for_stream() named. It is not given out
// again, so that work that comes too late finds the poison and nothing that could be taken for its own.

#include "tessera/tests/accelerator/late_memory.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "tessera/tests/accelerator/late_stream.h"

namespace tessera::testing {
namespace {

struct Block {
  void* start;
  std::size_t bytes;
  c10::Stream owner;
  std::mutex mutex;
  std::set<c10::StreamId> others = {};
};

// Holds poisoned memory, which work that comes too late may still use, until there is much of it.
class FreedMemory {
 public:
  void add(void* start, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    bytes_ += bytes;
    freed_.emplace_back(start, bytes);
    for (; bytes_ > kMost; freed_.pop_front()) {
      bytes_ -= freed_.front().second;
      std::free(freed_.front().first);
    }
  }

 private:
  static constexpr std::size_t kMost = std::size_t{256} << 20;
  std::mutex mutex_;
  std::deque<std::pair<void*, std::size_t>> freed_;
  std::size_t bytes_ = 0;
};

FreedMemory& freed_memory() {
  static auto* const only = new FreedMemory;
  return *only;
}

void poison(void* start, std::size_t bytes) { std::memset(start, kPoison, bytes); }

void free_block(void* context) {
  auto* const block = static_cast<Block*>(context);
  // The last of the streams poisons the memory: none waits for another.
  const auto left = std::make_shared<std::atomic<std::size_t>>(1 + block->others.size());
  const auto done = [left, start = block->start, bytes = block->bytes] {
    if (--*left > 0) return;
    poison(start, bytes);
    freed_memory().add(start, bytes);
  };
  for (const c10::StreamId id : block->others) {
    late_stream(c10::Stream(c10::Stream::UNSAFE, block->owner.device(), id)).give(done);
  }
  late_stream(block->owner).give(done);
  delete block;
}

class LateAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::impl::VirtualGuardImpl guard(kAccelerator);
    const c10::Device device = guard.getDevice();
    if (bytes == 0) return {nullptr, nullptr, &free_nothing, device};
    void* const start = std::malloc(bytes);
    if (start == nullptr) throw std::bad_alloc();
    poison(start, bytes);
    return {start, new Block{.start = start, .bytes = bytes, .owner = guard.getStream(device), .mutex = {}},
            &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static void free_nothing(void*) {}
};

LateAllocator& allocator() {
  static auto* const only = new LateAllocator;
  return *only;
}

const bool kRegistered = [] {
  c10::SetAllocator(kAccelerator, &allocator());
  return true;
}();

}  // namespace

void keep_for_stream(const c10::DataPtr& memory, const c10::Stream& stream) {
  if (memory.get_context() == nullptr) return;
  auto* const block = static_cast<Block*>(memory.get_context());
  const std::lock_guard lock(block->mutex);
  if (stream != block->owner) block->others.insert(stream.id());
}

}  // namespace tessera::testing
