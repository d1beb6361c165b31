#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace tessera {

// Keeps values that were used lately, in two halves. A value found in the older half moves to the newer one; when the
// newer half is full, it becomes the older one, and the previous older half is dropped. Any thread may call it.
//
// Invariants:
//   - At most `most` values are kept, and a value that is used stays while fewer than most / 2 others are used in
//     between.
//   - mutex_ guards both halves.
template <class Key, class Value>
class RecentCache {
 public:
  explicit RecentCache(std::size_t most) : most_(most) {}

  // Returns the value of the key of this hash for which is(key, value) holds, or nullptr.
  template <class Is>
  std::shared_ptr<const Value> find(std::size_t hash, const Is& is) {
    const std::lock_guard lock(mutex_);
    if (const auto found = find_in(newer_, hash, is); found != newer_.end()) return found->second.value;
    const auto found = find_in(older_, hash, is);
    if (found == older_.end()) return nullptr;
    std::shared_ptr<const Value> value = found->second.value;
    auto node = older_.extract(found);
    make_room();
    newer_.insert(std::move(node));
    return value;
  }
  void insert(std::size_t hash, Key key, std::shared_ptr<const Value> value) {
    const std::lock_guard lock(mutex_);
    make_room();
    newer_.emplace(hash, Entry{std::move(key), std::move(value)});
  }

 private:
  struct Entry {
    Key key;
    std::shared_ptr<const Value> value;
  };
  using Half = std::unordered_multimap<std::size_t, Entry>;

  template <class Is>
  static typename Half::iterator find_in(Half& half, std::size_t hash, const Is& is) {
    for (auto [it, end] = half.equal_range(hash); it != end; ++it) {
      if (is(it->second.key, *it->second.value)) return it;
    }
    return half.end();
  }
  void make_room() {
    if (newer_.size() < most_ / 2) return;
    older_ = std::exchange(newer_, {});
  }

  const std::size_t most_;
  std::mutex mutex_;
  Half newer_, older_;
};

}  // namespace tessera
