#pragma once

#include <string>

namespace tessera {

// Lets pread() fail with `error`, an errno, for as long as it lives, on files whose path has `part` in it: so a disk
// says that it has lost what they held.
class FailingReads {
 public:
  FailingReads(std::string part, int error);
  ~FailingReads();
  FailingReads(const FailingReads&) = delete;
  FailingReads& operator=(const FailingReads&) = delete;

  // Is what pread() asks: whether it fails, with errno set.
  bool fails(int fd) const;

 private:
  const std::string part_;
  const int error_;
};

}  // namespace tessera
