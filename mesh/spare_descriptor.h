#pragma once

#include <mutex>
#include <string>

namespace tessera {

// Keeps one file descriptor in reserve: a process that has used up its own can still read what became of a peer.
//
// Invariant: the descriptor is given up only while a Loan lives, and only where the process has no other one left. It
// is missing after that where another thread has taken it meanwhile; the next Loan tries to have one again.
//
// Several threads may use one at once. Nothing throws.
class SpareDescriptor {
 public:
  SpareDescriptor() noexcept;
  ~SpareDescriptor();
  SpareDescriptor(const SpareDescriptor&) = delete;
  SpareDescriptor& operator=(const SpareDescriptor&) = delete;

  // While it lives, this process can open one file.
  class Loan {
   public:
    explicit Loan(SpareDescriptor& spare) noexcept : spare_(spare) { spare_.give(); }
    ~Loan() { spare_.take(); }
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;

   private:
    SpareDescriptor& spare_;
  };

  // Returns what this process lacks for any new connection, such as "this process has no file descriptor left (Too many
  // open files); raise the limit (ulimit -n) or close files", or "". Libraries often report something else then.
  std::string what_is_lacking();

 private:
  void give() noexcept;
  void take() noexcept;
  int look() noexcept;

  std::mutex mutex_;  // guards the rest
  int fd_ = -1;
  int loans_ = 0;
  int error_ = 0;  // the system's reason for which the descriptor is given up, or 0
};

}  // namespace tessera
