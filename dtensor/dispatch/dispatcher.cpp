#include "tessera/dtensor/dispatch/dispatcher.h"

#include <atomic>
#include <set>

#include <spdlog/spdlog.h>

#include "tessera/dtensor/dispatch/execute.h"
#include "tessera/dtensor/gradient.h"

namespace tessera {
namespace dispatch {
namespace {

// Every operator's cache, and what they count.
struct Registry {
  std::mutex mutex;
  std::set<DecisionCache*> caches;
  std::atomic<uint64_t> hits = 0;
  std::atomic<uint64_t> misses = 0;
  std::atomic<uint64_t> replicated = 0;
};

Registry& registry() {
  static auto* const instance = new Registry();  // outlives the kernels in LibTorch's dispatcher
  return *instance;
}

uint64_t hash_of(const c10::SmallVectorImpl<uint64_t>& key) {
  uint64_t h = 0x9e3779b97f4a7c15ULL;
  for (const uint64_t word : key) {
    h = (h ^ word) * 0xff51afd7ed558ccdULL;
    h ^= h >> 32;
  }
  return h;
}

bool is_foreach(const std::string& key) {
  static const std::set<std::string, std::less<>> fused = {"_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad"};
  return key.starts_with("_foreach_") || fused.contains(key);
}

}  // namespace

DecisionPtr DecisionCache::find(uint64_t hash, const c10::SmallVectorImpl<uint64_t>& key) {
  const std::lock_guard lock(mutex_);
  auto [it, end] = entries_.equal_range(hash);
  for (; it != end; ++it) {
    if (std::equal(key.begin(), key.end(), it->second.key.begin(), it->second.key.end())) return it->second.decision;
  }
  return nullptr;
}

void DecisionCache::insert(uint64_t hash, const c10::SmallVectorImpl<uint64_t>& key, DecisionPtr decision) {
  const std::lock_guard lock(mutex_);
  if (entries_.size() >= kMaxDecisions) entries_.clear();
  entries_.emplace(hash, Entry{.key = {key.begin(), key.end()}, .decision = std::move(decision)});
}

void DecisionCache::clear() {
  const std::lock_guard lock(mutex_);
  entries_.clear();
}

std::size_t DecisionCache::size() {
  const std::lock_guard lock(mutex_);
  return entries_.size();
}

OpDispatcher::OpDispatcher(const c10::OperatorHandle& op) : traits_(op), foreach_(is_foreach(traits_.key)) {
  const std::lock_guard lock(registry().mutex);
  registry().caches.insert(&cache_);
}

void OpDispatcher::check_arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack) const {
  for (const at::IValue& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isTensor() && detail::is_dtensor(value.toTensor())) {
      detail::check_current(value.toTensor(), traits_.name.c_str());
    }
  }
}

// LibTorch's autograd leaves it to the operators that a list operator calls to count what is written.
void OpDispatcher::call_foreach(const Call& call) {
  std::vector<at::Tensor> written;
  for (const TensorArg& entry : call.tensors) {
    if (call.writes(entry) && !entry.tensor->is_inference()) written.push_back(*entry.tensor);
  }
  if (!run_foreach(call)) execute(call, *decision_for(call));
  for (const at::Tensor& t : written) t.unsafeGetTensorImpl()->bump_version();
}

OpDispatcher::~OpDispatcher() {
  const std::lock_guard lock(registry().mutex);
  registry().caches.erase(&cache_);
}

void OpDispatcher::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
  // Looked up at the first call, when every decomposition has been registered.
  std::call_once(looked_up_, [this] { decomposition_ = find_decomposition(traits_.key); });
  if (decomposition_ != nullptr) {
    check_arguments(op, *stack);
    if (decomposition_(op, *stack)) return;
  }
  const Call call = read_call(op, traits_, *stack);
  // Without gradient mode too: the forward of a custom autograd function runs so.
  for (const TensorArg& entry : call.tensors) {
    if (entry.tensor->defined()) detail::watch_gradient(*entry.tensor);
  }
  if (foreach_) {
    call_foreach(call);
    return;
  }
  execute(call, *decision_for(call));
}

DecisionPtr OpDispatcher::decision_for(const Call& call) {
  c10::SmallVector<uint64_t, 32> key;
  if (!append_key(call, key)) return decide(call);
  const uint64_t hash = hash_of(key);
  if (DecisionPtr found = cache_.find(hash, key)) {
    registry().hits.fetch_add(1, std::memory_order_relaxed);
    return found;
  }
  registry().misses.fetch_add(1, std::memory_order_relaxed);
  DecisionPtr made = decide(call);
  if (!made->by_rule) {
    registry().replicated.fetch_add(1, std::memory_order_relaxed);
    spdlog::debug("{}: no sharding rule that fits; runs replicated", traits_.name);
  }
  cache_.insert(hash, key, made);
  return made;
}

void dispatch_boxed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  static std::mutex mutex;
  static auto* const made = new std::map<std::string, std::unique_ptr<OpDispatcher>>();
  OpDispatcher* dispatcher = nullptr;
  {
    const std::lock_guard lock(mutex);
    auto& slot = (*made)[op.schema().name() + "." + op.schema().overload_name()];
    if (!slot) slot = std::make_unique<OpDispatcher>(op);
    dispatcher = slot.get();
  }
  (*dispatcher)(op, keys, stack);
}

}  // namespace dispatch

DispatchStatistics dispatch_statistics() {
  dispatch::Registry& r = dispatch::registry();
  DispatchStatistics out{.hits = r.hits, .misses = r.misses, .replicated = r.replicated};
  const std::lock_guard lock(r.mutex);
  for (dispatch::DecisionCache* cache : r.caches) out.cached += cache->size();
  return out;
}

void clear_dispatch_cache() {
  dispatch::Registry& r = dispatch::registry();
  const std::lock_guard lock(r.mutex);
  for (dispatch::DecisionCache* cache : r.caches) cache->clear();
}

}  // namespace tessera
