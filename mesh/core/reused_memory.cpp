#include "tessera/mesh/core/reused_memory.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Storage.h>

#include "tessera/mesh/core/in_memory.h"

namespace tessera {
namespace {

constexpr std::size_t kSmallest = 64 << 10;
constexpr std::size_t kLargest = 64 << 20;
constexpr std::size_t kMost = 128 << 20;

// Keeps the storages that reused_empty has handed out.
//
// Invariants:
//   - list_ is ordered by use, the latest last; its bytes sum to at most kMost.
//   - A storage is free if this list is its only owner, by its use count.
class Kept {
 public:
  // Returns a free storage of `bytes`, or null.
  c10::Storage take(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    for (auto it = list_.rbegin(); it != list_.rend(); ++it) {
      if (it->bytes != bytes || !is_free(*it)) continue;
      std::rotate(it.base() - 1, it.base(), list_.end());
      return list_.back().storage;
    }
    return {};
  }

  void add(const c10::Storage& storage) {
    const std::lock_guard lock(mutex_);
    std::size_t bytes = storage.nbytes();
    for (const One& each : list_) bytes += each.bytes;
    auto first = list_.begin();
    for (; bytes > kMost && first != list_.end(); ++first) bytes -= first->bytes;
    list_.erase(list_.begin(), first);
    list_.push_back({storage, storage.nbytes()});
  }

  bool has(const c10::Storage& storage) {
    const std::lock_guard lock(mutex_);
    const auto is_it = [&](const One& one) {
      return one.storage.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
    };
    return std::ranges::any_of(list_, is_it);
  }

  std::size_t free_bytes() {
    const std::lock_guard lock(mutex_);
    std::size_t out = 0;
    for (const One& each : list_) out += is_free(each) ? each.bytes : 0;
    return out;
  }

 private:
  struct One {
    c10::Storage storage;
    std::size_t bytes;  // when it was made; a holder may have resized it
  };

  // The fence is needed because the last holder may have been another thread. A storage whose memory a holder has
  // replaced is not free.
  static bool is_free([[maybe_unused]] const One& one) {
#if defined(__SANITIZE_THREAD__)
    // Under ThreadSanitizer nothing is reused: it does not understand fences, and does not see LibTorch's use counts.
    return false;
#else
    if (one.storage.use_count() != 1) return false;
    std::atomic_thread_fence(std::memory_order_acquire);
    return one.storage.nbytes() == one.bytes &&
           one.storage.data_ptr().get_deleter() == c10::GetCPUAllocator()->raw_deleter();
#endif
  }

  std::mutex mutex_;
  std::vector<One> list_;
};

Kept& kept() {
  static auto* const instance = new Kept();  // tensors may outlive static destruction
  return *instance;
}

}  // namespace

at::Tensor reused_empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  std::size_t bytes = options.dtype().itemsize();
  for (const int64_t size : sizes) bytes *= static_cast<std::size_t>(size);
  if (!options.device().is_cpu()) return at::empty(sizes, options);
  // empty_cpu skips the dispatcher.
  if (bytes < kSmallest || bytes > kLargest) {
    return at::Tensor(at::detail::empty_cpu(sizes, c10::typeMetaToScalarType(options.dtype())));
  }
  c10::Storage storage = kept().take(bytes);
  if (!storage) {
    at::Tensor made = at::empty(sizes, options);
    kept().add(made.storage());
    return made;
  }
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                   options.dtype());
  impl->set_sizes_contiguous(sizes);
  return at::Tensor(std::move(impl));
}

at::Tensor reused_copy(const at::Tensor& tensor) {
  at::Tensor out = reused_empty(tensor.sizes(), tensor.options());
  const bool small = tensor.is_cpu() && tensor.is_contiguous() && is_in_memory(tensor) && tensor.nbytes() < kSmallest;
  if (small && tensor.nbytes() > 0) {
    std::memcpy(out.mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes());
  } else {
    out.copy_(tensor);
  }
  return out;
}

std::size_t reusable_bytes() { return kept().free_bytes(); }

bool is_listed(const c10::Storage& storage) { return kept().has(storage); }

}  // namespace tessera
