#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>

#include <malloc.h>

#include <c10/core/CPUAllocator.h>

// Measures the peak memory of CPU tensors. It replaces LibTorch's allocator for the program, and counts per thread what
// that thread allocates and frees.
namespace tessera::testing {

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* const memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (memory == nullptr && bytes > 0) throw std::bad_alloc();
    in_use += size_of(memory);
    peak = std::max(peak, in_use);
    return {memory, memory, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  static inline thread_local int64_t in_use = 0;
  static inline thread_local int64_t peak = 0;

  static void install() {
    static CountingAllocator allocator;
    static const bool once = (c10::SetCPUAllocator(&allocator, 1), true);
    (void)once;
  }

 private:
  static int64_t size_of(void* memory) { return static_cast<int64_t>(malloc_usable_size(memory)); }
  static void release(void* memory) {
    in_use -= size_of(memory);
    std::free(memory);
  }
};

// Returns the most bytes in use on this thread while `body` runs, above those in use before.
template <class Body>
int64_t peak_bytes(const Body& body) {
  CountingAllocator::install();
  const int64_t before = CountingAllocator::peak = CountingAllocator::in_use;
  body();
  return CountingAllocator::peak - before;
}

}  // namespace tessera::testing
