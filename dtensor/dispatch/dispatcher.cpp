#include "tessera/dtensor/dispatch/dispatcher.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <utility>

#include <c10/core/AutogradState.h>
#include <c10/core/InferenceMode.h>

#include "tessera/dtensor/core/tensor_lists.h"
#include "tessera/dtensor/dispatch/copied_views.h"
#include "tessera/dtensor/dispatch/execute.h"
#include "tessera/dtensor/dispatch/gather.h"
#include "tessera/dtensor/gradient.h"
#include "tessera/dtensor/tangent.h"
#include "tessera/mesh/core/logger.h"
#include "tessera/mesh/recorder.h"

namespace tessera {
namespace dispatch {
namespace {

// Holds the caches of all operators, and their counters.
struct Registry {
  std::mutex mutex;
  std::set<DecisionCache*> caches;  // the caches that hold decisions
  uint64_t past_hits = 0;           // hits that were counted by caches before they were emptied
  std::atomic<uint64_t> misses = 0;
  std::atomic<uint64_t> replicated = 0;
};

Registry& registry() {
  static auto* const instance = new Registry();  // outlives the kernels in LibTorch's dispatcher
  return *instance;
}

bool decomposed_now(const DecompositionEntry& entry) {
  if (entry.run == nullptr) return false;
  return entry.calls == DecomposedCalls::kAll || c10::InferenceMode::is_enabled();
}

}  // namespace

bool is_foreach(const std::string& rule_name) {
  static const std::set<std::string, std::less<>> fused = {"_fused_adam", "_fused_adamw", "_fused_sgd",
                                                           "_fused_adagrad"};
  return rule_name.starts_with("_foreach_") || fused.contains(rule_name);
}

bool moves_inputs(const c10::OperatorHandle& op, torch::jit::Stack& args) {
  const OpTraits traits(op);
  return decide(read_call(op, traits, args))->moved;
}

void count_replicated(const std::string& op) {
  registry().replicated.fetch_add(1, std::memory_order_relaxed);
  logger().debug("{}: no sharding rule that fits; runs replicated", op);
}

DecisionCache::Entry* DecisionCache::Half::slot(uint64_t hash, at::ArrayRef<uint64_t> words) {
  if (entries.empty()) return nullptr;
  for (std::size_t i = hash;; ++i) {
    Entry& entry = entries[i & (entries.size() - 1)];
    if (entry.decision == nullptr || (entry.hash == hash && words == at::ArrayRef<uint64_t>(entry.words)))
      return &entry;
  }
}

const DecisionPtr* DecisionCache::Half::find(const Key& key) {
  const Entry* const found = slot(key.hash(), key.words());
  return found == nullptr || found->decision == nullptr ? nullptr : &found->decision;
}

DecisionCache::Entries DecisionCache::Half::put(Entry entry) {
  Entries gone;
  if (2 * (taken + 1) > entries.size()) gone = make_room();
  Entry& there = *slot(entry.hash, entry.words);
  if (there.decision == nullptr) ++taken;
  there = std::move(entry);
  return gone;
}

DecisionCache::Entries DecisionCache::Half::make_room() {
  Entries gone = std::exchange(entries, {});
  const auto is_kept = [](const Entry& entry) {
    return entry.decision != nullptr && !entry.decision->first_spec->mesh.world().is_retired();
  };
  const auto kept = std::partition(gone.begin(), gone.end(), [&](const Entry& entry) { return !is_kept(entry); });
  taken = static_cast<std::size_t>(gone.end() - kept);
  entries.resize(std::max<std::size_t>(8, (4 * taken > gone.size() ? 2 : 1) * gone.size()));
  for (auto entry = kept; entry != gone.end(); ++entry) *slot(entry->hash, entry->words) = std::move(*entry);
  gone.erase(kept, gone.end());
  return gone;
}

DecisionCache::Entries DecisionCache::put(Entry entry) {
  if (newer_.taken < kMaxDecisions / 2) return newer_.put(std::move(entry));
  Half gone = std::exchange(older_, std::exchange(newer_, Half()));
  newer_.put(std::move(entry));  // it is empty, and drops nothing
  return std::move(gone.entries);
}

DecisionPtr DecisionCache::taken(const DecisionPtr& found, bool operator_alone) {
  if (operator_alone && !found->operator_alone) return nullptr;
  if (!operator_alone || found->kernel == nullptr) ++hits_;
  return found;
}

DecisionPtr DecisionCache::find(const Key& key, bool operator_alone) {
  {
    const std::lock_guard lock(lock_);
    if (const DecisionPtr* const found = newer_.find(key)) return taken(*found, operator_alone);
    if (older_.entries.empty()) return nullptr;
  }
  return find_older(key, operator_alone);
}

DecisionPtr DecisionCache::find_older(const Key& key, bool operator_alone) {
  Entries gone;  // freed after the lock: a decision may own the last reference to a world
  const std::lock_guard lock(lock_);
  if (const DecisionPtr* const found = newer_.find(key)) return taken(*found, operator_alone);  // copied meanwhile
  const DecisionPtr* const found = older_.find(key);
  if (found == nullptr) return nullptr;
  const DecisionPtr decision = *found;
  --older_.taken;  // it counts in the newer half from now on
  gone = put({.hash = key.hash(), .words = {key.words().begin(), key.words().end()}, .decision = decision});
  return taken(decision, operator_alone);
}

void DecisionCache::count_hit() {
  const std::lock_guard lock(lock_);
  ++hits_;
}

void DecisionCache::insert(const Key& key, DecisionPtr decision) {
  Entries gone;
  const std::lock_guard lock(lock_);
  gone = put({.hash = key.hash(), .words = {key.words().begin(), key.words().end()}, .decision = std::move(decision)});
}

uint64_t DecisionCache::clear() {
  Half newer, older;
  const std::lock_guard lock(lock_);
  std::swap(newer, newer_);
  std::swap(older, older_);
  return std::exchange(hits_, 0);
}

std::size_t DecisionCache::size() {
  const std::lock_guard lock(lock_);
  return newer_.taken + older_.taken;
}

uint64_t DecisionCache::hits() {
  const std::lock_guard lock(lock_);
  return hits_;
}

OpDispatcher::OpDispatcher(const c10::OperatorHandle& op) : traits_(op), foreach_(is_foreach(traits_.rule_name)) {}

void OpDispatcher::check_arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack) const {
  const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  for (const at::IValue& value : arguments) {
    detail::each_tensor(value, [&](const at::Tensor& t, std::size_t) {
      if (detail::is_dtensor(t)) detail::check_current(t, traits_.name.c_str());
    });
  }
}

// Runs before the operator, whose formula reads the tangents of the tensors that it wrote.
void OpDispatcher::start_tangents(const c10::OperatorHandle& op, const torch::jit::Stack& stack) const {
  const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  const auto is_written = [&](std::size_t i) {
    return std::ranges::find(traits_.written_args, i) != traits_.written_args.end();
  };
  bool any = false;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (is_written(i)) continue;
    detail::each_tensor(arguments[i], [&](const at::Tensor& t, std::size_t) { any |= detail::has_tangent(t); });
  }
  if (!any) return;
  for (const std::size_t i : traits_.written_args) {
    detail::each_tensor(arguments[i], [](const at::Tensor& t, std::size_t) {
      if (detail::is_dtensor(t)) detail::start_tangent(t);
    });
  }
}

// LibTorch's autograd does not count the writes of a list operator; it expects the operators that it calls to do so.
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
  if (registry().caches.erase(&cache_) != 0) registry().past_hits += cache_.clear();
}

void OpDispatcher::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
  if (!traits_.written_args.empty() && traits_.out_args.empty()) start_tangents(op, *stack);
  if (const DecompositionEntry& entry = decomposition(); decomposed_now(entry)) {
    // Autograd has computed the tangents already.
    const c10::AutoFwGradMode no_tangents(false);
    check_arguments(op, *stack);
    if (entry.run(op, *stack)) return;
  }
  Call call = read_call(op, traits_, *stack);
  const Recorder::Span span(call.first_spec->mesh.world().recorder(), RecordKind::kOperator, traits_.name,
                            [&] { return contract_path(call); });
  // Gradients are watched also without gradient mode, in which the forward of a custom autograd function runs.
  for (const TensorArg& entry : call.tensors) {
    if (entry.tensor->defined()) detail::watch_gradient(*entry.tensor);
  }
  const CopiedViewWrites copies(call);
  copies.announce();
  if (foreach_) {
    call_foreach(call);
    copies.bring_back(/*raised_later=*/false);
    return;
  }
  const DecisionPtr decision = decide_gathered(call, [this](const Call& c) { return decision_for(c); });
  execute(call, *decision);
  return_plain(call);
  copies.bring_back(/*raised_later=*/true);
}

const DecompositionEntry& OpDispatcher::decomposition() {
  if (!looked_up_.load(std::memory_order_acquire)) {
    std::call_once(look_up_, [this] {
      decomposition_ = find_decomposition(traits_.name);
      looked_up_.store(true, std::memory_order_release);
    });
  }
  return decomposition_;
}

DecisionPtr OpDispatcher::find_operator_alone(const Key& key) {
  const DecompositionEntry& entry = decomposition();
  // A kernel of unboxed.h, which calls this function, passes no plain tensor.
  if (entry.calls != DecomposedCalls::kBesidePlainInInference && decomposed_now(entry)) return nullptr;
  return cache_.find(key, /*operator_alone=*/true);
}

DecisionPtr OpDispatcher::decision_for(const Call& call) {
  Key key(has_zero_or_nonfinite_number(call));
  if (!append_key(call, key)) return decide(call);
  if (DecisionPtr found = cache_.find(key)) return found;
  registry().misses.fetch_add(1, std::memory_order_relaxed);
  DecisionPtr made = decide(call);
  if (!made->by_rule) count_replicated(traits_.name);
  cache_.insert(key, made);
  const std::lock_guard lock(registry().mutex);
  registry().caches.insert(&cache_);
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
  const std::lock_guard lock(r.mutex);
  DispatchStatistics out{.hits = r.past_hits, .misses = r.misses, .replicated = r.replicated};
  for (dispatch::DecisionCache* cache : r.caches) {
    out.hits += cache->hits();
    out.cached += cache->size();
  }
  return out;
}

void clear_dispatch_cache() {
  dispatch::Registry& r = dispatch::registry();
  const std::lock_guard lock(r.mutex);
  for (dispatch::DecisionCache* cache : r.caches) r.past_hits += cache->clear();
  r.caches.clear();
}

}  // namespace tessera
