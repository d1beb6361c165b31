#pragma once

#include <string>

namespace train {

// Keeps a second job out of a run's folder while this one works there: it holds the lock (flock) of the file ".lock" in
// the folder, which the system releases when the process ends, also when it is killed. On a file system without locks
// it does nothing.
class RunLock {
 public:
  // Makes the folder where there is none. Another holder has three seconds to end, since a process that was killed may
  // need some; then std::invalid_argument is thrown.
  explicit RunLock(const std::string& run);
  // Removes the file, and the folder too if the constructor has made it and nothing is in it.
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  bool take();

  std::string run_, path_;
  bool is_made_ = false;  // the folder, by the constructor
  int file_ = -1;         // is -1 where there can be no lock
};

}  // namespace train
