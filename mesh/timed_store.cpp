#include "tessera/mesh/timed_store.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/mesh/core/poll.h"
#include "tessera/mesh/core/within.h"
#include "tessera/mesh/folder_store.h"
#include "tessera/mesh/signed_store.h"

namespace tessera {
namespace {

using Bytes = std::vector<uint8_t>;
using Keys = std::vector<std::string>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Milliseconds = std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

class TimedStore : public c10d::Store {
 public:
  TimedStore(StorePtr base, Milliseconds limit) : Store(base->getTimeout()), base_(std::move(base)), limit_(limit) {}

  using Store::compareSet;
  using Store::set;

  StorePtr clone() override {
    return timed_store(run("clone", [base = base_] { return base->clone(); }), limit_);
  }
  void set(const std::string& key, const Bytes& value) override {
    run("set", [base = base_, key, value] { base->set(key, value); });
  }
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    return run("compareSet",
               [base = base_, key, expected, desired] { return base->compareSet(key, expected, desired); });
  }
  Bytes get(const std::string& key) override {
    wait({key});
    return run("get", [base = base_, key] { return base->get(key); });
  }
  int64_t add(const std::string& key, int64_t value) override {
    return run("add", [base = base_, key, value] { return base->add(key, value); });
  }
  bool deleteKey(const std::string& key) override {
    return run("deleteKey", [base = base_, key] { return base->deleteKey(key); });
  }
  bool check(const Keys& keys) override {
    return run("check", [base = base_, keys] { return base->check(keys); });
  }
  int64_t getNumKeys() override {
    return run("getNumKeys", [base = base_] { return base->getNumKeys(); });
  }
  void wait(const Keys& keys) override { wait(keys, timeout_); }
  void wait(const Keys& keys, const Milliseconds& timeout) override {
    const Clock::time_point deadline = Clock::now() + timeout;
    if (poll_until(deadline, [&] { return check_by(keys, deadline); })) return;
    throw LateError(
        fmt::format("timed out after {} ms waiting in the store for {}", timeout.count(), fmt::join(keys, ", ")));
  }
  bool check_by(const Keys& keys, Clock::time_point deadline) {
    const auto left = std::chrono::duration_cast<Milliseconds>(deadline - Clock::now());
    return run(
        "check", [base = base_, keys] { return base->check(keys); }, std::clamp(left, Milliseconds(1), limit_));
  }

 private:
  enum State { kRuns, kReturned, kGivenUp };

  template <class Body>
  std::invoke_result_t<Body> run(const char* call, Body body) {
    return run(call, std::move(body), limit_);
  }
  template <class Body>
  std::invoke_result_t<Body> run(const char* call, Body body, Milliseconds limit) {
    const std::string what = fmt::format("the store, whose server may have been stopped or cut off: {}", call);
    if (late_->load() > 0) throw LateError(what + " was not tried: an earlier call timed out");
    const auto state = std::make_shared<std::atomic<State>>(kRuns);
    const auto returned = [late = late_, state] {
      if (state->exchange(kReturned) == kGivenUp) --*late;
    };
    try {
      return within(limit, what, [body = std::move(body), returned] {
        struct Return {
          decltype(returned)& say;
          ~Return() { say(); }
        } const on_return{returned};
        return body();
      });
    } catch (const LateError&) {
      ++*late_;
      if (state->exchange(kGivenUp) == kReturned) --*late_;
      throw;
    }
  }

  // Counts the calls that were given up and have not returned since. While there is one, other calls fail at once, so
  // that a whole sequence of calls takes little more than one limit.
  const std::shared_ptr<std::atomic<int>> late_ = std::make_shared<std::atomic<int>>(0);
  const StorePtr base_;
  const Milliseconds limit_;
};

}  // namespace

StorePtr timed_store(StorePtr base, Milliseconds limit) {
  return c10::make_intrusive<TimedStore>(std::move(base), limit);
}

bool check_by(c10d::Store& store, const Keys& keys, Clock::time_point deadline) {
  auto* const timed = dynamic_cast<TimedStore*>(&store);
  return timed == nullptr ? store.check(keys) : timed->check_by(keys, deadline);
}

const c10d::Store& innermost_store(const c10d::Store& store) {
  if (const c10d::Store* const base = base_of_signed(store)) return innermost_store(*base);
  const auto* const prefixed = dynamic_cast<const c10d::PrefixStore*>(&store);
  if (prefixed == nullptr) return store;
  // The accessor is not const, though it changes nothing.
  return innermost_store(*const_cast<c10d::PrefixStore*>(prefixed)->getUnderlyingNonPrefixStore());
}

std::string place_of(const c10d::Store& store) {
  const auto* const folder = dynamic_cast<const FolderStore*>(&innermost_store(store));
  return folder == nullptr ? "" : " in the folder " + folder->path();
}

bool never_blocks(const c10d::Store& store) {
  const c10d::Store& innermost = innermost_store(store);
  return dynamic_cast<const FolderStore*>(&innermost) != nullptr ||
         dynamic_cast<const c10d::HashStore*>(&innermost) != nullptr;
}

}  // namespace tessera
