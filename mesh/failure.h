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

// Why a job has failed.
struct Failure {
  enum class Kind {
    kError,    // a rank threw and said why
    kLost,     // a rank ended without a word; `rank` is -1 where it is not known which
    kTimeout,  // a rank waited in vain
  };
  Kind kind = Kind::kError;
  int64_t rank = -1;  // that failed or was lost (kTimeout: that waited)
  std::string where;  // the operator and collective, or the name of the callback
  std::string text;
  friend bool operator==(const Failure&, const Failure&) = default;
};

// "rank 1 failed in forward: index 7 is out of range", "a peer was lost: rank 2 was killed by signal 9", ...
std::string to_string(const Failure& failure);

// The form that is kept in the store, and back; nullopt on text that is no such form.
std::string encode(const Failure& failure);
std::optional<Failure> decode_failure(const std::string& text);

// Where the record of a failed job is in its store.
inline constexpr const char* kFailureKey = "tessera/failure";

// What one rank knows and tells of the job's failure: a local flag, a record in the store, and the file in which a
// launcher notes a rank that it saw die. Safe from several threads.
class FailureBoard {
 public:
  // `store` may be null for a world of one. `lost_file` may be empty. Announces this process to the store, so that
  // others can see on the same host that it has ended; of one that ended before it came here, the launcher's
  // `lost_file`.RANK tells.
  FailureBoard(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t size, std::string lost_file);

  bool failed() const noexcept { return failed_.load(); }
  // The failure that this rank acts on. Only after failed().
  Failure failure() const;

  // Makes `failure` this rank's failure, unless it has one. Tells the store that this rank knows.
  void adopt(const Failure& failure) noexcept;
  // Writes `failure` to the store unless a record is there already. Never throws.
  void publish(const Failure& failure) noexcept;
  // The record in the store, else what the launcher's file says.
  std::optional<Failure> find() noexcept;
  // Looks for at most `patience` for a record, the launcher's file, or one of `ranks` whose process has ended.
  std::optional<Failure> search(const std::vector<int64_t>& ranks, std::chrono::milliseconds patience) noexcept;
  // Tells the others that this rank's collective ended by the failure.
  void come() noexcept;
  // Those of `ranks` that did not come within `patience`: they run something else, or not at all. Only after failed().
  std::vector<int64_t> absent(const std::vector<int64_t>& ranks, std::chrono::milliseconds patience) noexcept;
  // The rank that serves the store stays until the others have read of the failure, at most `patience`.
  void linger(std::chrono::milliseconds patience) noexcept;

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
