#pragma once

#include <sys/types.h>

#include <set>
#include <string>
#include <utility>

namespace tessera {

// While it lives, this process becomes the parent of every descendant that its own parent leaves behind
// (PR_SET_CHILD_SUBREAPER), whatever session or process group it went to; end_all() kills them.
//
// Left alone are the children that this process had before, and those in its own process group: other threads may have
// started them.
class Subreaper {
 public:
  Subreaper();
  ~Subreaper();
  Subreaper(const Subreaper&) = delete;
  Subreaper& operator=(const Subreaper&) = delete;

  // Kills the processes whose parent this one became, and then what they leave behind, until there is none, at most 2
  // seconds: call it when the children whose descendants are meant have ended.
  void end_all() const;

 private:
  using Process = std::pair<pid_t, std::string>;  // and its start time: numbers are used again
  struct Child {
    Process process;
    pid_t group;
  };
  template <typename Visit>
  static void for_each_child(const Visit& visit);

  std::set<Process> before_;
  int was_subreaper_ = 0;  // whether it is so without this object
};

}  // namespace tessera
