#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "tessera/dtensor/dispatch/decision.h"

namespace tessera {

// How often a call's decision was found in the cache, over all operators since the program began.
struct DispatchStatistics {
  uint64_t hits = 0;
  uint64_t misses = 0;
  uint64_t replicated = 0;  // misses for which no rule fits
  std::size_t cached = 0;   // decisions held now
};
DispatchStatistics dispatch_statistics();
// Forgets every decision. For tests, and at exit so that worlds end before LibTorch does.
void clear_dispatch_cache();

namespace dispatch {

// One operator's decisions, by everything that they depend on. At most kMaxDecisions: when full, it starts anew.
class DecisionCache {
 public:
  static constexpr std::size_t kMaxDecisions = 1024;

  // Counted where found; `direct`: none but a direct one is.
  DecisionPtr find(const Key& key, bool direct = false);
  void insert(const Key& key, DecisionPtr decision);
  // How often one was found since the last time.
  uint64_t clear();
  std::size_t size();
  uint64_t hits();

 private:
  // Held for a few words' comparison: a mutex takes longer to lock and to unlock than that.
  class Lock {
   public:
    void lock() {
      while (taken_.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
    }
    void unlock() { taken_.clear(std::memory_order_release); }

   private:
    std::atomic_flag taken_;
  };
  struct Entry {
    uint64_t hash = 0;
    std::vector<uint64_t> words;
    DecisionPtr decision;  // nullptr: vacant
  };
  // Where `key` is, or would be.
  Entry& slot(uint64_t hash, at::ArrayRef<uint64_t> words);
  void grow();

  Lock lock_;
  uint64_t hits_ = 0;
  std::vector<Entry> entries_;  // open addressing; a power of two of them, at most half taken
  std::size_t taken_ = 0;
};

// The boxed kernel of one operator at the DTensor key: runs it on DTensors.
class OpDispatcher final : public c10::OperatorKernel {
 public:
  explicit OpDispatcher(const c10::OperatorHandle& op);
  ~OpDispatcher() override;
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
  const OpTraits& traits() const { return traits_; }
  // Of a call that has been decided; nullptr where it has not, where it is not direct, and where the operator is
  // decomposed.
  DecisionPtr direct(const Key& key);

 private:
  // Looked up at the first call, when every one has been registered.
  const DecompositionEntry& decomposition();
  DecisionPtr decision_for(const Call& call);
  // What read_call checks, for operators that are decomposed before it.
  void check_arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack) const;
  void call_foreach(const Call& call);

  OpTraits traits_;
  std::once_flag look_up_;
  std::atomic<bool> looked_up_ = false;  // asked first: call_once writes to the thread's storage at every call
  DecompositionEntry decomposition_;
  bool foreach_ = false;
  DecisionCache cache_;
};

// The dispatcher of any operator, also of one registered after this library was loaded.
void dispatch_boxed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// Whether the operator, of this rule's name, is one of those that run_foreach runs.
bool is_foreach(const std::string& key);

// Whether the operator would act on other pieces than these arguments have now. Nothing runs.
bool moves_inputs(const c10::OperatorHandle& op, torch::jit::Stack& args);

// Counts a call on whole tensors for want of another way.
void count_replicated(const std::string& op);

// A `_foreach_` operator, or a fused optimizer's step, on the pieces of all lists at once; tensors that lie otherwise
// than the first list's are brought there. False where that cannot be.
bool run_foreach(const Call& call);

}  // namespace dispatch
}  // namespace tessera
