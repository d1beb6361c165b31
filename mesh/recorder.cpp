#include "tessera/mesh/recorder.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <ctime>
#include <limits>
#include <stdexcept>
#include <utility>

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tessera {

const char* to_string(RecordKind kind) {
  switch (kind) {
    case RecordKind::kOperator: return "operator";
    case RecordKind::kCollective: return "collective";
    case RecordKind::kModule: return "module";
    case RecordKind::kSpan: return "span";
  }
  return "";
}

namespace {

// The stamp of a slot is its sequence with the kind in the lowest bits.
constexpr int kKindBits = 2;
constexpr uint64_t kKindMask = (1U << kKindBits) - 1;

// Is the stamp of a slot that is being written: no record has number 0.
constexpr uint64_t kBusy = kKindMask;

uint64_t stamp_of(uint64_t sequence, RecordKind kind) { return sequence << kKindBits | static_cast<uint64_t>(kind); }

std::string text_of(const std::string* text) { return text == nullptr ? "" : *text; }

std::string state_of(const Record& record) {
  if (record.has_ended()) return fmt::format("{:.3f} ms", static_cast<double>(record.end_ns - record.begin_ns) / 1e6);
  if (record.waited_from_ns != 0) return fmt::format("waits since {}", utc_text(record.waited_from_ns));
  return fmt::format("has not ended since {}", utc_text(record.begin_ns));
}

}  // namespace

struct Recorder::Filling {
  RecordKind kind;
  const std::string* name = nullptr;
  const std::string* path = nullptr;
  const std::string* op = nullptr;
  const Group* group = nullptr;
  int64_t serial = 0;
  int64_t bytes = 0;
};

Recorder::Recorder(int64_t rank, std::size_t capacity) : rank_(rank) { restart(capacity); }

void Recorder::set_on(bool on) { on_.store(on && capacity_ > 0, std::memory_order_relaxed); }

void Recorder::restart(std::size_t capacity) {
  constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max() / 2;
  if (capacity > kMost) throw std::length_error(fmt::format("Recorder: no memory holds {} records", capacity));
  const std::size_t rounded = capacity == 0 ? 0 : std::bit_ceil(capacity);
  std::unique_ptr<Slot[]> slots = rounded == 0 ? nullptr : std::make_unique<Slot[]>(rounded);  // may throw
  const std::lock_guard lock(ring_mutex_);
  set_on(false);
  capacity_ = rounded;
  slots_ = std::move(slots);
  forgotten_ = next_ - 1;
  set_on(true);
}

// ---- Writing
// ---------------------------------------------------------------------------------------------------------

const std::string* Recorder::keep(std::string_view text) {
  const std::lock_guard lock(mutex_);
  if (const auto found = text_of_.find(text); found != text_of_.end()) return found->second;
  const std::string& added = texts_.emplace_back(text);
  text_of_.emplace(added, &added);
  return &added;
}

const std::string* Recorder::kept(std::string_view text) {
  if (text.empty()) return nullptr;
  const auto address = reinterpret_cast<std::uintptr_t>(text.data()) >> 3;
  std::atomic<const std::string*>& seen = seen_[(address ^ address >> 9) % seen_.size()];
  const std::string* known = seen.load(std::memory_order_acquire);
  if (known != nullptr && *known == text) return known;
  known = keep(text);
  seen.store(known, std::memory_order_release);
  return known;
}

Recorder::Group& Recorder::group_of(std::string_view mesh_dim, const std::vector<int64_t>& ranks) {
  const std::lock_guard lock(mutex_);
  const auto found =
      std::ranges::find_if(groups_, [&](const Group& g) { return g.mesh_dim == mesh_dim && g.ranks == ranks; });
  if (found != groups_.end()) return *found;
  Group& added = groups_.emplace_back();
  added.mesh_dim = mesh_dim;
  added.ranks = ranks;
  return added;
}

uint64_t Recorder::fill(const Filling& filling) {
  constexpr auto kRelease = std::memory_order_release;
  const uint64_t sequence = next_.fetch_add(1, std::memory_order_relaxed);
  Slot& slot = slot_of(sequence);
  uint64_t before = slot.stamp.load(std::memory_order_relaxed);
  do {
    // While this thread was held up, others may have gone once around: then this record is lost, not theirs.
    if (before == kBusy || before >> kKindBits > sequence) return sequence;
  } while (!slot.stamp.compare_exchange_weak(before, kBusy, std::memory_order_acquire));
  slot.end.store(0, kRelease);
  slot.waited_from.store(0, kRelease);
  slot.name.store(filling.name, kRelease);
  slot.path.store(filling.path, kRelease);
  slot.op.store(filling.op, kRelease);
  slot.group.store(filling.group, kRelease);
  slot.serial.store(filling.serial, kRelease);
  slot.bytes.store(filling.bytes, kRelease);
  slot.begin.store(c10::getApproximateTime(), kRelease);
  slot.stamp.store(stamp_of(sequence, filling.kind), kRelease);
  return sequence;
}

uint64_t Recorder::begin(RecordKind kind, std::string_view name, const std::string* path) {
  return fill({.kind = kind, .name = kept(name), .path = path == nullptr ? nullptr : kept(*path)});
}

uint64_t Recorder::begin(const Collective& collective) {
  Group& group = group_of(collective.mesh_dim, collective.ranks);
  return fill({.kind = RecordKind::kCollective,
               .name = kept(collective.kind),
               .path = kept(collective.path),
               .op = kept(collective.op),
               .group = &group,
               .serial = group.collectives.fetch_add(1, std::memory_order_relaxed) + 1,
               .bytes = collective.bytes});
}

Recorder::Slot* Recorder::find(uint64_t sequence) const {
  if (sequence == 0 || capacity_ == 0) return nullptr;
  Slot& slot = slot_of(sequence);
  return slot.stamp.load(std::memory_order_relaxed) >> kKindBits == sequence ? &slot : nullptr;
}

void Recorder::wait_begins(uint64_t sequence) {
  Slot* const slot = find(sequence);
  if (slot == nullptr || slot->waited_from.load(std::memory_order_relaxed) != 0) return;
  slot->waited_from.store(c10::getApproximateTime(), std::memory_order_release);
}

void Recorder::wait_pauses(uint64_t sequence) {
  if (Slot* const slot = find(sequence)) slot->waited_from.store(0, std::memory_order_release);
}

void Recorder::end(uint64_t sequence) {
  if (sequence == 0 || capacity_ == 0) return;
  const auto now = c10::getApproximateTime();
  if (Slot* const slot = find(sequence)) slot->end.store(now, std::memory_order_release);
}

// ---- Reading
// ---------------------------------------------------------------------------------------------------------

// Returns false where the record is not there: it was overwritten, or is being written.
bool Recorder::read(uint64_t sequence, const std::function<int64_t(c10::approx_time_t)>& to_ns, Record& out) const {
  constexpr auto kAcquire = std::memory_order_acquire;
  const Slot& slot = slot_of(sequence);
  const uint64_t stamp = slot.stamp.load(kAcquire);
  if (stamp >> kKindBits != sequence) return false;
  const uint64_t begin = slot.begin.load(kAcquire), end = slot.end.load(kAcquire);
  const uint64_t waited_from = slot.waited_from.load(kAcquire);
  const std::string* const name = slot.name.load(kAcquire);
  const std::string* const path = slot.path.load(kAcquire);
  const std::string* const op = slot.op.load(kAcquire);
  const Group* const group = slot.group.load(kAcquire);
  const int64_t serial = slot.serial.load(kAcquire), bytes = slot.bytes.load(kAcquire);
  if (slot.stamp.load(std::memory_order_relaxed) != stamp) return false;
  out = {.rank = rank_,
         .sequence = sequence - forgotten_,
         .kind = static_cast<RecordKind>(stamp & kKindMask),
         .name = text_of(name),
         .path = text_of(path),
         .begin_ns = to_ns(begin),
         .end_ns = end == 0 ? 0 : to_ns(end),
         .op = text_of(op),
         .mesh_dim = group == nullptr ? "" : group->mesh_dim,
         .ranks = group == nullptr ? std::vector<int64_t>() : group->ranks,
         .serial = serial,
         .bytes = bytes,
         .waited_from_ns = waited_from == 0 ? 0 : to_ns(waited_from)};
  return true;
}

std::vector<Record> Recorder::records(std::size_t most) const {
  const std::lock_guard ring_lock(ring_mutex_);
  const uint64_t next = next_.load(std::memory_order_acquire);
  const uint64_t count = std::min<uint64_t>({next - 1 - forgotten_, capacity_, most});
  std::vector<Record> out;
  if (count == 0) return out;
  const auto to_ns = [this] {
    const std::lock_guard lock(mutex_);
    return clock_.makeConverter();
  }();
  out.reserve(count);
  for (uint64_t sequence = next - count; sequence < next; ++sequence) {
    Record record;
    if (read(sequence, to_ns, record)) out.push_back(std::move(record));
  }
  return out;
}

std::vector<CollectiveCount> Recorder::collective_counts() const {
  const std::lock_guard lock(mutex_);
  std::vector<CollectiveCount> counts;
  for (const Group& group : groups_) {
    counts.push_back(
        {.mesh_dim = group.mesh_dim, .ranks = group.ranks, .count = group.collectives.load(std::memory_order_relaxed)});
  }
  return counts;
}

std::string to_string(const Record& record) {
  std::string text = fmt::format("#{} {}", record.sequence, record.name);
  if (!record.op.empty()) text += fmt::format(" of {}", record.op);
  if (!record.path.empty()) text += fmt::format(" ({})", record.path);
  if (record.kind == RecordKind::kCollective) {
    text += fmt::format(" on {}, no. {} of ranks {}, {} bytes", record.mesh_dim, record.serial,
                        fmt::join(record.ranks, ", "), record.bytes);
  }
  return text + ", " + state_of(record);
}

std::string to_string(const std::vector<Record>& records) {
  std::string text;
  for (const Record& record : records) text += to_string(record) + "\n";
  return text;
}

std::string utc_text(int64_t ns) {
  const std::chrono::nanoseconds since_1970(ns);
  const auto seconds = std::chrono::floor<std::chrono::seconds>(since_1970);
  const auto rest = std::chrono::duration_cast<std::chrono::milliseconds>(since_1970 - seconds);
  return fmt::format("{:%F %T}.{:03} UTC", fmt::gmtime(static_cast<std::time_t>(seconds.count())), rest.count());
}

}  // namespace tessera
