#include "tessera/placement/partition.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tessera {
namespace {

class Chunks final : public Partition {
 public:
  Chunks() : Partition("S", "") {}
  Intervals part(int64_t size, int64_t parts, int64_t index) const override {
    const Interval range = chunk_range(size, parts, index);
    return one_interval(range.begin, range.end);
  }
  bool exact() const override { return true; }
};

class Ragged final : public Partition {
 public:
  explicit Ragged(const std::vector<int64_t>& sizes)
      : Partition("RS", fmt::format("{}", fmt::join(sizes, ","))), starts_(sizes.size() + 1, 0) {
    if (sizes.empty() || std::any_of(sizes.begin(), sizes.end(), [](int64_t size) { return size < 0; })) {
      throw std::invalid_argument(fmt::format(
          "RaggedShard: sizes [{}] are no parts; give one size of at least 0 per rank", fmt::join(sizes, ", ")));
    }
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] > std::numeric_limits<int64_t>::max() - starts_[i]) {
        throw std::invalid_argument(
            fmt::format("RaggedShard: the sum of the sizes [{}] is too large", fmt::join(sizes, ", ")));
      }
      starts_[i + 1] = starts_[i] + sizes[i];
    }
  }
  Intervals part(int64_t, int64_t, int64_t index) const override {
    const auto i = static_cast<std::size_t>(index);
    return one_interval(starts_[i], starts_[i + 1]);
  }
  std::optional<int64_t> parts() const override { return static_cast<int64_t>(starts_.size()) - 1; }
  std::optional<int64_t> size() const override { return starts_.back(); }
  bool exact() const override { return true; }

 private:
  std::vector<int64_t> starts_;
};

class BlockCyclicPartition final : public Partition {
 public:
  explicit BlockCyclicPartition(int64_t block) : Partition("BC", std::to_string(block)), block_(block) {
    if (block < 1) {
      throw std::invalid_argument(fmt::format("BlockCyclic: a block of {} elements; give at least 1", block));
    }
  }
  Intervals part(int64_t size, int64_t parts, int64_t index) const override {
    Intervals out;
    // Compares and subtracts what remains, so that no sum overflows.
    for (int64_t begin = index <= size / block_ ? index * block_ : size; begin < size;) {
      append(out, {.begin = begin, .end = begin + std::min(block_, size - begin)});
      if ((size - begin) / block_ < parts) break;
      begin += parts * block_;
    }
    return out;
  }
  bool exact() const override { return true; }

 private:
  const int64_t block_;
};

std::string text_of(const std::vector<Intervals>& parts) {
  std::string out;
  for (const Intervals& part : parts) out += (out.empty() ? "" : ",") + to_string(part);
  return out;
}

class IntervalLists final : public Partition {
 public:
  explicit IntervalLists(const std::vector<Intervals>& parts) : Partition("IS", text_of(parts)), parts_(parts) {
    if (parts.empty()) throw std::invalid_argument("IntervalShard: no parts; give one list of intervals per rank");
    for (const Intervals& part : parts) {
      size_ += count(part);
      for (std::size_t i = 0; i < part.size(); ++i) {
        const bool after = i == 0 ? part[i].begin >= 0 : part[i].begin > part[i - 1].end;
        if (part[i].size() > 0 && after) continue;
        throw std::invalid_argument(
            fmt::format("IntervalShard: part {} is not a list of intervals, each of at least one element, each beyond "
                        "the one before",
                        to_string(part)));
      }
    }
  }
  Intervals part(int64_t, int64_t, int64_t index) const override { return parts_[static_cast<std::size_t>(index)]; }
  std::optional<int64_t> parts() const override { return static_cast<int64_t>(parts_.size()); }
  std::optional<int64_t> size() const override { return size_; }

 private:
  const std::vector<Intervals> parts_;
  int64_t size_ = 0;
};

// Throws unless the parts hold each of `size` elements exactly once.
void check_cover(const Partition& partition, int64_t size, int64_t parts, const std::string& who) {
  std::vector<Interval> all;
  for (int64_t i = 0; i < parts; ++i) {
    const Intervals part = partition.part(size, parts, i);
    for (std::size_t k = 0; k < part.size(); ++k) {
      if (part[k].size() > 0 && (k == 0 || part[k - 1].end < part[k].begin)) continue;
      throw std::invalid_argument(
          fmt::format("{}: {} gives part {} of {} as {}; part() must return ascending intervals of at least one "
                      "element, and one interval where two touch (append() joins them)",
                      who, partition.text(), i, parts, to_string(part)));
    }
    all.insert(all.end(), part.begin(), part.end());
  }
  std::sort(all.begin(), all.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  int64_t next = 0;
  for (const Interval& interval : all) {
    if (interval.begin != next) {
      next = std::min(next, interval.begin);
      break;
    }
    next = interval.end;
  }
  if (next == size && (all.empty() ? 0 : all.back().end) == size) return;
  throw std::invalid_argument(fmt::format(
      "{}: the {} parts of {} do not hold each of {} elements once; element {} is missing, held twice or outside", who,
      parts, partition.text(), size, next));
}

}  // namespace

Interval chunk_range(int64_t dim_size, int64_t num_parts, int64_t index) {
  if (dim_size < 0 || num_parts < 1 || index < 0 || index >= num_parts) {
    throw std::invalid_argument(fmt::format(
        "chunk_range: part {} of {} parts of {} elements does not exist; need a size of at least 0 and a part "
        "in [0, {}), the coordinate on the sharded mesh dimension, not the global rank",
        index, num_parts, dim_size, num_parts));
  }
  const int64_t full = dim_size / num_parts + (dim_size % num_parts != 0);
  // index * full may overflow.
  const int64_t begin = full == 0 || index > dim_size / full ? dim_size : index * full;
  return {.begin = begin, .end = begin + std::min(full, dim_size - begin)};
}

const PartitionPtr& chunks() {
  static const Chunks instance;
  // The pointer owns nothing, so copying it changes no reference count.
  static const PartitionPtr pointer(PartitionPtr(), &instance);
  return pointer;
}

PartitionPtr ragged(const std::vector<int64_t>& sizes) { return std::make_shared<const Ragged>(sizes); }
PartitionPtr block_cyclic(int64_t block) { return std::make_shared<const BlockCyclicPartition>(block); }
PartitionPtr interval_lists(const std::vector<Intervals>& parts) {
  return std::make_shared<const IntervalLists>(parts);
}

void check_partition(const Partition& partition, int64_t size, int64_t parts, const std::string& who) {
  if (partition.parts().value_or(parts) != parts) {
    throw std::invalid_argument(
        fmt::format("{}: {} has {} parts, but its mesh dimensions have {} coordinates together; give one part per "
                    "coordinate",
                    who, partition.text(), *partition.parts(), parts));
  }
  if (partition.size().value_or(size) != size) {
    throw std::invalid_argument(fmt::format(
        "{}: {} cuts {} elements, but the earlier mesh dimensions leave {}; the sizes of its parts must add up to "
        "that",
        who, partition.text(), *partition.size(), size));
  }
  if (partition.exact()) {
    (void)partition.part(size, parts, 0);  // throws where a user's partition breaks its promise
  } else {
    check_cover(partition, size, parts, who);
  }
}

}  // namespace tessera
