#include "tessera/tests/gpu/api_calls.h"

#include <dlfcn.h>

#include <mutex>
#include <set>
#include <stdexcept>
#include <vector>

#include <ATen/record_function.h>
#include <cupti.h>
#include <fmt/format.h>

namespace tessera::testing {
namespace {

thread_local std::vector<std::string> operators;  // that run on this thread, the outermost first

// Returns CUPTI's function of that name. LibTorch has loaded its library.
template <class Function>
Function* cupti(const char* name) {
  static void* const library = dlopen("libcupti.so.13", RTLD_NOW);
  void* const found = library == nullptr ? nullptr : dlsym(library, name);
  if (found == nullptr) throw std::runtime_error(fmt::format("CUPTI has no {}", name));
  return reinterpret_cast<Function*>(found);
}

void check(CUptiResult result, const char* what) {
  if (result != CUPTI_SUCCESS)
    throw std::runtime_error(fmt::format("CUPTI: {} failed: {}", what, static_cast<int>(result)));
}

// Says whether a call of this name waits for the GPU. A copy to or from memory that is not pinned is followed by a
// synchronization of its stream.
bool waits(const std::string& function) {
  static const std::set<std::string> names = {"cudaStreamSynchronize", "cudaDeviceSynchronize",
                                              "cudaEventSynchronize",  "cudaMemcpy",
                                              "cudaMemcpy2D",          "cudaFree",
                                              "cudaFreeHost",          "cudaMalloc",
                                              "cudaHostAlloc"};
  return names.contains(function.substr(0, function.find("_v")));
}

std::unique_ptr<at::ObserverContext> begin_operator(const at::RecordFunction& function) {
  operators.emplace_back(function.name());
  return nullptr;
}

void end_operator(const at::RecordFunction&, at::ObserverContext*) {
  if (!operators.empty()) operators.pop_back();
}

}  // namespace

struct WaitCounter::Impl {
  mutable std::mutex mutex;
  std::map<std::string, int64_t> calls;
  CUpti_SubscriberHandle subscriber = nullptr;
  at::CallbackHandle handle = 0;

  static void CUPTIAPI called(void* self, CUpti_CallbackDomain, CUpti_CallbackId, const void* data) {
    const auto* const call = static_cast<const CUpti_CallbackData*>(data);
    if (call->callbackSite != CUPTI_API_ENTER || !waits(call->functionName)) return;
    std::string text = call->functionName;
    for (auto it = operators.rbegin(); it != operators.rend(); ++it) {
      text += (it == operators.rbegin() ? " in " : " < ") + *it;
    }
    auto* const impl = static_cast<Impl*>(self);
    const std::lock_guard lock(impl->mutex);
    ++impl->calls[text];
  }
};

WaitCounter::WaitCounter() : impl_(std::make_unique<Impl>()) {
  impl_->handle = at::addGlobalCallback(at::RecordFunctionCallback(&begin_operator, &end_operator)
                                            .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  check(cupti<decltype(cuptiSubscribe)>("cuptiSubscribe")(&impl_->subscriber, &Impl::called, impl_.get()),
        "subscribing");
  check(cupti<decltype(cuptiEnableDomain)>("cuptiEnableDomain")(1, impl_->subscriber, CUPTI_CB_DOMAIN_RUNTIME_API),
        "watching the runtime");
}

WaitCounter::~WaitCounter() {
  cupti<decltype(cuptiUnsubscribe)>("cuptiUnsubscribe")(impl_->subscriber);
  at::removeCallback(impl_->handle);
}

std::map<std::string, int64_t> WaitCounter::calls() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->calls;
}

std::string WaitCounter::text() const {
  std::string out;
  for (const auto& [what, count] : calls()) out += fmt::format("{:>5} {}\n", count, what);
  return out;
}

}  // namespace tessera::testing
