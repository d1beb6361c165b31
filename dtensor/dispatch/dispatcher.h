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

// Counts how often a call's decision was found in the caches of all operators (hits), and how often it was not
// (misses), since the program began.
struct DispatchStatistics {
  uint64_t hits = 0;
  uint64_t misses = 0;
  uint64_t replicated = 0;  // calls decided to run replicated, since no rule fits
  std::size_t cached = 0;   // decisions held now
};
DispatchStatistics dispatch_statistics();
// Drops every cached decision. Tests call it, and it runs at exit so that worlds end before LibTorch does.
void clear_dispatch_cache();

namespace dispatch {

// Caches one operator's decisions by everything that they depend on, in two halves. A decision found in the older half
// is copied to the newer one; when that is full, it becomes the older one, and what the older one held is dropped. So
// where sequences of many lengths make ever new decisions, those that every step uses stay. A half that would grow
// drops the decisions of retired worlds first, since a decision holds its World.
//
// Invariants:
//   - It holds at most kMaxDecisions.
//   - lock_ guards every member.
class DecisionCache {
 public:
  static constexpr std::size_t kMaxDecisions = 1024;

  // Returns the decision of `key`, or nullptr; with `operator_alone`, only one whose Decision::operator_alone is set.
  // Counts a hit where it returns one; but with `operator_alone` a caller that takes a decision with a kernel counts
  // it.
  DecisionPtr find(const Key& key, bool operator_alone = false);
  void count_hit();
  void insert(const Key& key, DecisionPtr decision);
  // Empties the cache, and returns the number of hits since the last clear().
  uint64_t clear();
  std::size_t size();
  uint64_t hits();

 private:
  // Is a spin lock. It is held while a few words are compared, and to lock and unlock a mutex takes longer than that.
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
    DecisionPtr decision;  // nullptr: the entry is free
  };
  using Entries = std::vector<Entry>;
  // Is an open-addressing table.
  //
  // Invariants:
  //   - entries is empty or of a power of two in size, and at most half taken; taken is the number of its decisions, in
  //     the older half of those that have not been copied.
  struct Half {
    Entries entries;
    std::size_t taken = 0;

    // Returns the entry of this key, or the free one where it would be inserted; of an empty table nullptr.
    Entry* slot(uint64_t hash, at::ArrayRef<uint64_t> words);
    const DecisionPtr* find(const Key& key);
    // Returns what is dropped for the entry.
    Entries put(Entry entry);
    // Drops the decisions of retired worlds, and returns them; doubles the table where the others take a quarter of it.
    Entries make_room();
  };
  // Puts an entry into the newer half, and returns what is dropped for it.
  Entries put(Entry entry);
  DecisionPtr find_older(const Key& key, bool operator_alone);
  // Counts a hit, and returns the decision where find() does.
  DecisionPtr taken(const DecisionPtr& found, bool operator_alone);

  Lock lock_;
  uint64_t hits_ = 0;
  Half newer_, older_;
};

// Runs one operator on DTensors, as its boxed kernel at the DTensor dispatch key.
class OpDispatcher final : public c10::OperatorKernel {
 public:
  explicit OpDispatcher(const c10::OperatorHandle& op);
  ~OpDispatcher() override;
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
  const OpTraits& traits() const { return traits_; }
  // Returns the cached decision of a call if its Decision::operator_alone is set; nullptr otherwise, and where the
  // operator is decomposed.
  DecisionPtr find_operator_alone(const Key& key);
  void count_hit() { cache_.count_hit(); }

 private:
  // Looks up the operator's decomposition at the first call, when all of them are registered.
  const DecompositionEntry& decomposition();
  DecisionPtr decision_for(const Call& call);
  // Gives written arguments a tangent of zeros where another argument has a tangent.
  void start_tangents(const c10::OperatorHandle& op, const torch::jit::Stack& stack) const;
  // Checks what read_call checks, for operators that are decomposed before it.
  void check_arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack) const;
  void call_foreach(const Call& call);

  OpTraits traits_;
  std::once_flag look_up_;
  std::atomic<bool> looked_up_ = false;  // read first, since call_once writes to thread-local storage at every call
  DecompositionEntry decomposition_;
  bool foreach_ = false;
  DecisionCache cache_;
};

// Is the backend fallback: dispatches, on DTensors, an operator that was registered after this library was loaded.
void dispatch_boxed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// Says whether run_foreach handles the operator with this rule name.
bool is_foreach(const std::string& rule_name);

// Says whether the operator would redistribute these arguments before it runs. Nothing runs.
bool moves_inputs(const c10::OperatorHandle& op, torch::jit::Stack& args);

// Counts a call that runs replicated because no rule fits.
void count_replicated(const std::string& op);

// Runs a `_foreach_` operator or a fused optimizer's step on the pieces of all lists at once. A tensor is
// redistributed if its layout differs from that of the first list's tensor at its index. Returns false where that is
// not possible.
bool run_foreach(const Call& call);

// Returns a result of a list operator as a DTensor with the layout of `first`, the first list's tensor at its index,
// whose layout is `spec`; what is pending there is reduced. Where `first` is not dense, the result is.
at::Tensor wrap_like(const at::Tensor& local, const at::Tensor& first, const Spec& spec);

// Is called while an exception of a list operator on the pieces is handled. If the operator throws on the global shapes
// and dtypes too, every rank throws that; else this rank alone may have failed, and the World fails.
[[noreturn]] void rethrow_of_list(const c10::OperatorHandle& op, torch::jit::Stack args, World& world);

}  // namespace dispatch
}  // namespace tessera
