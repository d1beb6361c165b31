#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <c10/util/ApproximateClock.h>

namespace tessera {

enum class RecordKind : uint8_t {
  kOperator,    // one operator on DTensors, as this rank runs it on its pieces
  kCollective,  // one collective, from its start to the end of the wait for it
  kModule,      // forward of a module that TESSERA_MODULE declares
  kSpan,        // what a user encloses in a Recorder::Span
};
const char* to_string(RecordKind kind);  // "operator", "collective", "module", "span"

// Describes what one rank did from begin_ns to end_ns. It is a value. Times are nanoseconds since 1970 by this rank's
// clock, and those of its host: over NCCL a collective ends when the host has queued the wait for it, not when the GPU
// has done it.
struct Record {
  int64_t rank = 0;
  uint64_t sequence = 0;  // 1 for the first record of the World, and for the first one after a restart()
  RecordKind kind = RecordKind::kSpan;
  std::string name;  // "aten::mm", "all_reduce", the module's path, or the name that a user gave
  std::string path;  // the parameter or hooked module that took part, or ""
  int64_t begin_ns = 0;
  int64_t end_ns = 0;  // 0: it has not ended

  // These are for a collective alone.
  std::string op;              // the operator that caused it, or ""
  std::string mesh_dim;        // the mesh dimension's name, or its index as text
  std::vector<int64_t> ranks;  // the global ranks of its group
  int64_t serial = 0;          // 1 for the first collective on that mesh dimension with these ranks; alike on all ranks
  int64_t bytes = 0;           // size of this rank's input
  // Is when this rank began to wait for the result; under Checked, for the comparison before it, unless the rank goes
  // on meanwhile. 0: it has not.
  int64_t waited_from_ns = 0;

  bool has_ended() const { return end_ns != 0; }
  friend bool operator==(const Record&, const Record&) = default;
};

// Says how many collectives a rank has begun on one mesh dimension with these ranks. It is a value.
struct CollectiveCount {
  std::string mesh_dim;
  std::vector<int64_t> ranks;
  int64_t count = 0;  // the serial of the last one
  friend bool operator==(const CollectiveCount&, const CollectiveCount&) = default;
};

// Returns one line, such as "#7 all_reduce of aten::mm (up.weight) on tp, no. 3 of ranks 0, 1, 4096 bytes, 0.125 ms".
// In the place of a time a record that has not ended has "waits since 2026-11-29 02:33:01.123 UTC" where its rank has
// begun to wait for the result, else "has not ended since" and when it began.
std::string to_string(const Record& record);
// Returns one line for each record.
std::string to_string(const std::vector<Record>& records);
// Returns a time of a Record as text: "2026-11-29 02:33:01.123 UTC".
std::string utc_text(int64_t ns);

// Keeps the last records of a World in a ring of fixed size: operators, collectives, hooked modules and users' spans.
// Each World has one, which is on unless WorldOptions::recorder_capacity is 0. A record takes two readings of the
// clock, and allocates only for a name that is new, so that it can stay on; docs/performance.md has its cost.
//
// Invariants:
//   - Any thread may write and read at any time, also after a failure; only restart() needs other writers to be idle.
//   - Sequences run on in a restart, so that what began before it leaves later records alone.
//   - A record is in the ring from its begin, so that what has not ended is seen. A record is overwritten when
//     `capacity` later ones have begun.
//   - texts_ keeps every different name and path as long as the Recorder lives: slots point to them.
class Recorder {
 public:
  // The capacity is rounded up to a power of two; 0 keeps nothing.
  Recorder(int64_t rank, std::size_t capacity);
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  bool on() const { return on_.load(std::memory_order_relaxed); }
  // Records from now on, or pauses. Does nothing where the capacity is 0. Collectives are numbered while it is on:
  // switch it on, on every rank, between the same two collectives.
  void set_on(bool on);
  std::size_t capacity() const { return capacity_; }
  // Forgets all records and keeps the last `capacity` from now on; 0 switches it off. What has begun and not ended is
  // forgotten too. No other thread may run operators or collectives of this World meanwhile; others may read.
  void restart(std::size_t capacity);

  // Returns the records that are in the ring, oldest first, at most the last `most` of them. Does not communicate.
  std::vector<Record> records(std::size_t most = std::numeric_limits<std::size_t>::max()) const;
  // Returns how many collectives have been numbered, also those whose records were overwritten, in the order in which
  // the mesh dimensions first had one. Does not communicate.
  std::vector<CollectiveCount> collective_counts() const;

  // Records what is done while it lives:
  //   const Recorder::Span span(mesh.world().recorder(), "forward");
  class Span {
   public:
    Span(Recorder& recorder, std::string_view name) : Span(recorder, RecordKind::kSpan, name, [] { return nullptr; }) {}
    // `path_of` returns a const std::string*, or nullptr; it is called only if the recorder is on.
    template <class PathOf>
    Span(Recorder& recorder, RecordKind kind, std::string_view name, const PathOf& path_of) {
      if (!recorder.on()) return;
      recorder_ = &recorder;
      sequence_ = recorder.begin(kind, name, path_of());
    }
    ~Span() {
      if (recorder_ != nullptr) recorder_->end(sequence_);
    }
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;

   private:
    Recorder* recorder_ = nullptr;
    uint64_t sequence_ = 0;
  };

  // ---- for the library --------------------------------------------------------------------------------------------
  // Begin a record and return its sequence, by which it is ended. They may be called only if the recorder is on.
  uint64_t begin(RecordKind kind, std::string_view name, const std::string* path);
  struct Collective {
    std::string_view kind, op, path, mesh_dim;
    const std::vector<int64_t>& ranks;
    int64_t bytes = 0;
  };
  uint64_t begin(const Collective& collective);
  // Say that this rank begins to wait, of which the first time counts; that it goes on without the result, so that the
  // next time counts; and that the record ends. A record that was overwritten or forgotten is left alone (unless a
  // thread is held up in these calls while others go once around the ring), and so is sequence 0.
  void wait_begins(uint64_t sequence);
  void wait_pauses(uint64_t sequence);
  void end(uint64_t sequence);

 private:
  // Holds the ranks along one mesh dimension.
  struct Group {
    std::string mesh_dim;
    std::vector<int64_t> ranks;
    std::atomic<int64_t> collectives{0};
  };
  // Holds one record. `stamp` is its sequence and kind, 0 before the first one, and that of no record while a writer
  // fills it; a reader compares the stamp before and after. Releases and acquires keep the order; fences would too, but
  // ThreadSanitizer does not know them. On x86 they are plain loads and stores.
  struct Slot {
    std::atomic<uint64_t> stamp{0};
    std::atomic<uint64_t> begin{0};
    std::atomic<uint64_t> end{0};
    std::atomic<uint64_t> waited_from{0};
    std::atomic<const std::string*> name{nullptr};
    std::atomic<const std::string*> path{nullptr};
    std::atomic<const std::string*> op{nullptr};
    std::atomic<const Group*> group{nullptr};
    std::atomic<int64_t> serial{0};
    std::atomic<int64_t> bytes{0};
  };
  struct Filling;  // what a writer puts into a slot

  // Returns the slot of a record, or nullptr if it is not there.
  Slot* find(uint64_t sequence) const;
  Slot& slot_of(uint64_t sequence) const { return slots_[sequence & (capacity_ - 1)]; }
  uint64_t fill(const Filling& filling);
  // Returns the kept text that equals `text`, nullptr for "".
  const std::string* kept(std::string_view text);
  const std::string* keep(std::string_view text);
  Group& group_of(std::string_view mesh_dim, const std::vector<int64_t>& ranks);
  bool read(uint64_t sequence, const std::function<int64_t(c10::approx_time_t)>& to_ns, Record& out) const;

  const int64_t rank_;
  std::atomic<bool> on_{false};
  std::atomic<uint64_t> next_{1};
  mutable std::mutex ring_mutex_;  // is held by readers of the members below, and while restart() changes them
  uint64_t forgotten_ = 0;         // the last sequence before the restart
  std::size_t capacity_ = 0;       // a power of two, or 0
  std::unique_ptr<Slot[]> slots_;

  mutable std::mutex mutex_;  // guards the members below, except what seen_ holds; taken after ring_mutex_
  mutable c10::ApproximateClockToUnixTimeConverter clock_;
  std::deque<std::string> texts_;
  std::unordered_map<std::string_view, const std::string*> text_of_;
  std::deque<Group> groups_;
  // Holds kept texts at places that follow from the addresses of equal texts, so that most lookups take no lock.
  std::array<std::atomic<const std::string*>, 512> seen_{};
};

}  // namespace tessera
