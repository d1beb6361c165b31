#include "tessera/bench/memory.h"

#include <atomic>
#include <cstddef>
#include <cstring>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

namespace tessera::bench {
namespace {

// The size is stored this many bytes before the memory that is returned, which keeps its alignment.
constexpr std::size_t kHead = 64;

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &give_back, c10::Device(c10::DeviceType::CPU)};
    auto* const begin = static_cast<std::byte*>(c10::alloc_cpu(bytes + kHead));
    const auto count = static_cast<int64_t>(bytes);
    std::memcpy(begin, &count, sizeof count);
    const int64_t now = allocated += count;
    for (int64_t most = peak; now > most && !peak.compare_exchange_weak(most, now);) {
    }
    return {begin + kHead, begin + kHead, &give_back, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

  static inline std::atomic<int64_t> allocated{0};
  static inline std::atomic<int64_t> peak{0};

 private:
  static void give_back(void* data) {
    if (data == nullptr) return;
    auto* const begin = static_cast<std::byte*>(data) - kHead;
    int64_t count = 0;
    std::memcpy(&count, begin, sizeof count);
    allocated -= count;
    c10::free_cpu(begin);
  }
};

// Installs the counting allocator. Earlier tensors keep their own deleter. The allocator is never destroyed, since
// tensors may outlive main.
void count() {
  static CountingAllocator* const counting = [] {
    auto* const made = new CountingAllocator;
    c10::SetCPUAllocator(made, /*priority=*/100);
    return made;
  }();
  static_cast<void>(counting);
}

}  // namespace

int64_t allocated_bytes() {
  count();
  return CountingAllocator::allocated;
}

int64_t peak_bytes() {
  count();
  return CountingAllocator::peak;
}

void restart_peak() {
  count();
  CountingAllocator::peak = CountingAllocator::allocated.load();
}

}  // namespace tessera::bench
