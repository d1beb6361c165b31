#pragma once

#include <functional>
#include <string>

namespace tessera {

// Lets pread() fail with `error`, an errno, for as long as it lives, on files whose path has `part` in it: so a disk
// says that it has lost what they held.
class FailingReads {
 public:
  FailingReads(std::string part, int error);
  // Calls `before` before each of these reads, which then fails with the errno that it returns, or does not where this
  // is 0.
  FailingReads(std::string part, std::function<int()> before);
  ~FailingReads();
  FailingReads(const FailingReads&) = delete;
  FailingReads& operator=(const FailingReads&) = delete;

  // Is what pread() asks: whether it fails, with errno set.
  bool fails(int fd) const;

 private:
  const std::string part_;
  const std::function<int()> before_;
};

}  // namespace tessera
