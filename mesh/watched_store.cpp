#include "tessera/mesh/watched_store.h"

#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/mesh/core/poll.h"
#include "tessera/mesh/failure.h"
#include "tessera/mesh/timed_store.h"

namespace tessera {
namespace {

using Bytes = std::vector<uint8_t>;
using Clock = std::chrono::steady_clock;

// A wait looks for a failure this often.
constexpr auto kFailureLook = std::chrono::milliseconds(250);

// LibTorch's watchdog of an NCCL group writes this key before it aborts the group, to ask all ranks for a dump, whether
// or not they make any. Where rank 0 serves the store and is stopped, the write would take the whole time limit and
// delay the abort by it. So it is not written.
constexpr std::string_view kDumpKey = "exception_dump";

class WatchedStore : public c10d::Store {
 public:
  WatchedStore(c10::intrusive_ptr<c10d::Store> base, std::shared_ptr<FailureBoard> board, std::vector<int64_t> ranks)
      : Store(base->getTimeout()), base_(std::move(base)), board_(std::move(board)), ranks_(std::move(ranks)) {}

  using Store::compareSet;
  using Store::set;

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<WatchedStore>(base_->clone(), board_, ranks_);
  }
  void set(const std::string& key, const Bytes& value) override {
    if (!key.ends_with(kDumpKey)) base_->set(key, value);
  }
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    return base_->compareSet(key, expected, desired);
  }
  Bytes get(const std::string& key) override {
    wait({key});
    return base_->get(key);
  }
  int64_t add(const std::string& key, int64_t value) override { return base_->add(key, value); }
  bool deleteKey(const std::string& key) override { return base_->deleteKey(key); }
  bool check(const std::vector<std::string>& keys) override { return base_->check(keys); }
  int64_t getNumKeys() override { return base_->getNumKeys(); }
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;

 private:
  void throw_if_failed();

  const c10::intrusive_ptr<c10d::Store> base_;
  const std::shared_ptr<FailureBoard> board_;
  const std::vector<int64_t> ranks_;
};

void WatchedStore::throw_if_failed() {
  if (!board_->failed()) {
    // The caller publishes this failure, since only it knows what it was doing.
    const std::optional<Failure> found = board_->search(ranks_, std::chrono::milliseconds::zero());
    if (!found.has_value()) return;
    throw std::runtime_error(to_string(*found));
  }
  throw std::runtime_error(to_string(board_->failure()));
}

void WatchedStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  const Clock::time_point deadline = Clock::now() + timeout;
  Clock::time_point next_failure_look = Clock::now() + kFailureLook;
  const bool came = poll_until(deadline, [&] {
    if (check_by(*base_, keys, deadline)) return true;
    if (Clock::now() >= next_failure_look) {
      throw_if_failed();
      next_failure_look = Clock::now() + kFailureLook;
    }
    return false;
  });
  if (came) return;
  const std::string place = place_of(*base_);
  throw std::runtime_error(
      fmt::format("timed out after {} ms waiting for the other ranks to join{} (keys {}); start every rank, or raise "
                  "TESSERA_TIMEOUT{}",
                  timeout.count(), place, fmt::join(keys, ", "),
                  place.empty() ? ""
                                : "; ranks on several hosts need LOCAL_WORLD_SIZE and a MASTER_ADDR that all of them "
                                  "reach, and those of one host with different /tmp a TESSERA_STORE that they all "
                                  "see"));
}

}  // namespace

c10::intrusive_ptr<c10d::Store> watch_store(c10::intrusive_ptr<c10d::Store> base, std::shared_ptr<FailureBoard> board,
                                            std::vector<int64_t> ranks) {
  return c10::make_intrusive<WatchedStore>(std::move(base), std::move(board), std::move(ranks));
}

}  // namespace tessera
