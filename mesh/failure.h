#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Store;
}  // namespace c10d

namespace tessera {

// Says why a job has failed.
struct Failure {
  enum class Kind {
    kError,    // a rank threw and said why
    kLost,     // a rank ended without an error of its own; `rank` is -1 when it is not known which
    kTimeout,  // a rank waited until its time limit
  };
  Kind kind = Kind::kError;
  int64_t rank = -1;  // the rank that failed or was lost; for kTimeout the one that waited
  std::string where;  // the operator and collective, or the name of the callback
  std::string text;
  friend bool operator==(const Failure&, const Failure&) = default;
};

// Returns text such as "rank 1 failed in forward: index 7 is out of range" or "a peer was lost: rank 2 was killed by
// signal 9".
std::string to_string(const Failure& failure);

// These convert a failure to the text that the store holds, and back. decode_failure returns nullopt on other text.
std::string encode(const Failure& failure);
std::optional<Failure> decode_failure(const std::string& text);

// The job's store holds the failure's record under this key.
inline constexpr const char* kFailureKey = "tessera/failure";

// Through this class one rank records and looks up the job's failure: in a local flag, in a record in the store, and in
// the file in which a launcher notes a rank that it saw die.
//
// Invariants:
//   - failure() never changes once failed() is true, and the store keeps the first record written to it.
//
// Several threads may call it at once.
class FailureBoard {
 public:
  // Writes this process's id and start time to the store, from which other ranks on the same host can see that it has
  // ended. For a rank that ended before it wrote these, the launcher's file `lost_file`.RANK says how it ended. `store`
  // may be null in a world of one rank; `lost_file` may be empty.
  FailureBoard(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t size, std::string lost_file);

  bool failed() const noexcept { return failed_.load(); }
  // Returns the failure that this rank has acknowledged. Call it only after failed().
  Failure failure() const;

  // Makes `failure` this rank's failure unless it has one already, and notes in the store that this rank knows.
  void acknowledge(const Failure& failure) noexcept;
  // Writes `failure` to the store unless a record is there already. Never throws.
  void publish(const Failure& failure) noexcept;
  // Returns the record in the store, else the one that the launcher's file gives, else nullopt.
  std::optional<Failure> find() noexcept;
  // Calls find() repeatedly for at most `patience`. Returns what it finds, else a failure that names one of `ranks`
  // whose process has ended.
  std::optional<Failure> search(const std::vector<int64_t>& ranks, std::chrono::milliseconds patience) noexcept;
  // Notes in the store that the failure has ended this rank's collective.
  void announce_arrival() noexcept;
  // Returns those of `ranks` that have not called announce_arrival() within `patience`: they run something else, or
  // have ended. Call it only after failed().
  std::vector<int64_t> absent(const std::vector<int64_t>& ranks, std::chrono::milliseconds patience) noexcept;
  // On the rank that serves the store, waits until the other ranks know of the failure, at most `patience`. Returns at
  // once on other ranks.
  void wait_until_acknowledged(std::chrono::milliseconds patience) noexcept;

 private:
  std::optional<Failure> find_in_store();
  std::optional<Failure> find_in_file() const;
  std::optional<Failure> find_ended_process(const std::vector<int64_t>& ranks);
  std::string how_it_ended(int64_t rank);

  const c10::intrusive_ptr<c10d::Store> store_;
  const int64_t rank_;
  const int64_t size_;
  const std::string lost_file_;
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;  // guards failure_
  Failure failure_;
};

}  // namespace tessera
