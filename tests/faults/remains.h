#pragma once

#include <string>
#include <vector>

namespace tessera::faults {

// Gives this process, and those that it starts, a /dev/shm of their own, so that what is left there is this campaign's.
// Returns "" or why that is not possible.
std::string use_own_shared_memory();

// Remembers which processes and files there are, to tell those that a trial leaves from them.
class Before {
 public:
  // Looks at this process's children, at /dev/shm and at `folders`.
  explicit Before(std::vector<std::string> folders);
  // Returns what is new, as text for each; a process gets half a second to end. Waits for children that have ended.
  std::vector<std::string> left() const;

 private:
  std::vector<std::string> files() const;

  std::vector<std::string> folders_;
  std::vector<std::string> files_;
  std::vector<int> children_;
};

}  // namespace tessera::faults
