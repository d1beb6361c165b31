#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "tessera/mesh/spare_descriptor.h"

namespace c10d {
class Store;
}  // namespace c10d

namespace tessera {

// Is how long a rank that fails before others have joined keeps its store for them. Nobody waits for it meanwhile.
inline constexpr std::chrono::milliseconds kStartPatience{3000};

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

// Says whether `key` is one through which ranks tell each other of a failure.
bool is_failure_key(const std::string& key);

// Says whether the text of an error is that of a system call or device of this process, such as "Too many open files",
// which no other rank has caused.
bool is_own_error(const std::string& text);
// Says the same of an error, by its type or its text: memory that cannot be had is this process's own lack.
bool is_own_error(const std::exception& error);

// Returns a text that the store of a job's World gives every rank alike, and that of no other job gives: what describes
// the process of rank 0. Returns "" where the store does not give it within a second.
std::string job_name(const c10::intrusive_ptr<c10d::Store>& store);

// Through this class one rank records and looks up the job's failure: in a local flag, in a record in the store, and in
// the file in which a launcher notes a rank that it saw die.
//
// Invariants:
//   - failure() never changes once failed() is true, and the store keeps the first record written to it.
//   - No call but the constructor waits for a store that does not answer for longer than a second at a time.
//   - What a call needs to look it up can be opened by a process that has used up its file descriptors, too.
//
// Several threads may call it at once.
class FailureBoard {
 public:
  struct Options {
    c10::intrusive_ptr<c10d::Store> store;  // null in a world of one rank
    int64_t rank = 0;
    int64_t size = 1;
    std::string settings;  // options that all ranks must have alike, as text for people
    std::chrono::milliseconds timeout = std::chrono::minutes(5);  // of the constructor, for a store that is slow
    // For a rank that ended before it had joined, the launcher's file `lost_file`.RANK says how it ended. May be empty.
    std::string lost_file;
    bool rank_0_serves_store = false;  // a TCPStore in rank 0's process
  };
  // Writes this process's host, id and start time to the store, from which other ranks on the same host can see that it
  // has ended. When another process has joined as this rank, or the ranks of another world, or ranks with other
  // settings, std::runtime_error is thrown; it is published as the job's failure too, unless the ranks that are there
  // joined longer ago than `timeout`.
  explicit FailureBoard(Options options);

  bool failed() const noexcept { return failed_.load(); }
  // Returns the failure that this rank has acknowledged. Call it only after failed().
  Failure failure() const;

  // Returns SpareDescriptor::what_is_lacking() of this process.
  std::string what_is_lacking() { return spare_.what_is_lacking(); }
  // While the result lives, this process can open one file.
  SpareDescriptor::Loan lend_descriptor() noexcept { return SpareDescriptor::Loan(spare_); }

  // Makes `failure` this rank's failure unless it has one already, and notes in the store that this rank knows.
  void acknowledge(const Failure& failure) noexcept;
  // Writes `failure` to the store unless a record is there already. Tries for `patience` while the store does not
  // answer. Returns whether the store has one then. Never throws.
  bool publish(const Failure& failure, std::chrono::milliseconds patience) noexcept;
  // Returns the record in the store, else the one that the launcher's file gives, else nullopt.
  std::optional<Failure> find() noexcept;
  // Calls find() repeatedly for at most `patience`. Returns what it finds, else a failure that names one of `ranks`
  // whose process has ended.
  std::optional<Failure> search(const std::vector<int64_t>& ranks, std::chrono::milliseconds patience) noexcept;
  // Says whether the job has failed, or the process of one of `ranks` has ended.
  bool has_lost(const std::vector<int64_t>& ranks) noexcept {
    return failed() || search(ranks, std::chrono::milliseconds::zero()).has_value();
  }
  // Keeps what `ranks` have written about their processes, so that their ends can be seen when the store is gone.
  void remember(const std::vector<int64_t>& ranks) noexcept;
  // Notes in the store that the failure has ended this rank's collective.
  void announce_arrival() noexcept;
  // Returns text such as "; ranks [2] did not come to it" about those of `ranks` that have not called
  // announce_arrival() within `patience`, since they run something else, or "; ranks [2] do not answer" about those
  // that have not called acknowledge() either: they have ended, were stopped or were cut off. Where the failure is that
  // of a rank outside `ranks`, which has waited for others, the first text ends with "the collective of this rank".
  // Returns "" where all came. Where the store ends meanwhile, what it said last counts. The rank that serves the store
  // then waits for half a second at most until the others have looked too. Call it only after failed().
  std::string who_is_missing(const std::vector<int64_t>& ranks, std::chrono::milliseconds patience) noexcept;
  // Waits, at most `patience`, until the store may end with this rank's process. Where rank 0 serves it, that rank
  // waits until the others know of the failure, and the others do not wait. Else every rank waits until all have
  // joined: the last process that has a store's folder removes it, and a rank that comes later would find none of the
  // failure.
  void keep_store_for_others(std::chrono::milliseconds patience) noexcept;

 private:
  void join();
  std::vector<int64_t> everyone() const;
  // Says to the others that this rank cannot join them. Returns whether the store has taken that.
  bool publish_joining(const std::string& text) noexcept;
  bool is_old_job(const std::string& size) noexcept;
  std::optional<Failure> find_in_store();
  std::optional<Failure> find_in_file() const;
  std::optional<Failure> find_ended_process(const std::vector<int64_t>& ranks);
  std::string how_it_ended(int64_t rank);
  // Returns what `rank` has written about its process, or "" if it has not joined.
  std::string process_of(int64_t rank);
  struct Missing {
    std::vector<int64_t> silent;  // those that do not answer
    std::vector<int64_t> busy;    // those that know of the failure, and did not come
    bool everyone_came() const { return silent.empty() && busy.empty(); }
  };
  Missing look_who_is_missing(const std::vector<int64_t>& ranks);
  void let_others_look();
  std::vector<int64_t> without_key(const std::vector<int64_t>& ranks, std::string (*key)(int64_t),
                                   std::chrono::milliseconds patience);
  bool try_in_store(const char* what, const std::function<void()>& body) noexcept;

  const Options options_;
  const c10::intrusive_ptr<c10d::Store> store_;
  SpareDescriptor spare_;
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;  // guards the rest
  Failure failure_;
  std::map<int64_t, std::string> processes_;  // what ranks have written about themselves
};

}  // namespace tessera
