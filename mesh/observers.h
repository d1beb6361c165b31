#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace tessera {

struct CollectiveRecord;

// Holds the functions that are called for each collective of a World. Several threads may use one at once.
class Observers : public std::enable_shared_from_this<Observers> {
 public:
  using Sink = std::function<void(const CollectiveRecord&)>;

  // Calls `sink` for every record until the returned token is destroyed, which may be after this object's last owner.
  std::shared_ptr<void> add(Sink sink);
  void record(const CollectiveRecord& record);
  bool any() const { return any_.load(std::memory_order_relaxed); }

 private:
  void remove(const Sink* sink);

  std::mutex mutex_;  // guards sinks_
  std::vector<std::shared_ptr<Sink>> sinks_;
  std::atomic<bool> any_{false};
};

}  // namespace tessera
