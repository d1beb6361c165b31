#pragma once

#include <sys/types.h>

#include <functional>
#include <set>
#include <string>
#include <utility>

namespace tessera {

// While it lives, this process becomes the parent of every descendant whose own parent has ended
// (PR_SET_CHILD_SUBREAPER), in any session or process group; end_all() kills those descendants.
//
// Invariants:
//   - It never kills, nor waits for, a child that this process had before, nor one in this process's own process group,
//     since other threads may have started them.
class Subreaper {
 public:
  Subreaper();
  ~Subreaper();
  Subreaper(const Subreaper&) = delete;
  Subreaper& operator=(const Subreaper&) = delete;

  // Kills the processes whose parent this one has become, and then those that they leave behind, until there is none,
  // for at most 2 seconds. Call it when the children that started them have ended.
  void end_all() const;
  // Waits for those of them that have ended, which are zombies until then. Leaves those alone for which `is_own`
  // returns true: the caller waits for them itself.
  void reap(const std::function<bool(pid_t)>& is_own) const;

 private:
  using Process = std::pair<pid_t, std::string>;  // pid and start time, since pids are reused
  struct Child {
    Process process;
    pid_t group;
  };
  template <typename Visit>
  static void for_each_child(const Visit& visit);
  bool is_left_behind(const Child& child) const;

  std::set<Process> before_;
  int was_subreaper_ = 0;  // whether this process was one before
};

}  // namespace tessera
