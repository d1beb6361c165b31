#pragma once

#include <chrono>
#include <string>

#include <sys/types.h>

namespace tessera {

// Returns $TMPDIR/tessera-UID/HASH_OF_JOB, a folder for the ranks of one host and one job. Makes the folder around it,
// with mode 0700. Throws std::runtime_error when that cannot be made, belongs to another user, or has another mode.
std::string folder_of_job(const std::string& job_id);

// Holds a folder in which the ranks of a job find each other. It belongs to this user and has mode 0700. The first
// process of the job empties the folder, since files in it are left from an earlier job that crashed. The last process
// removes it.
class JobFolder {
 public:
  // Makes the folder unless it is there. Throws std::runtime_error when it cannot be made, belongs to another user, has
  // another mode or holds files that no JobFolder has made, and when a stopped process keeps its lock for `patience`.
  JobFolder(std::string path, std::chrono::milliseconds patience);
  ~JobFolder();
  JobFolder(const JobFolder&) = delete;
  JobFolder& operator=(const JobFolder&) = delete;

  const std::string& path() const { return path_; }
  // Returns the open folder, which stays valid after somebody has removed or renamed it.
  int descriptor() const { return folder_; }
  // Says whether the folder still has its name: a removed one cannot hold files.
  bool is_there() const;

 private:
  bool open_lock();
  bool share_lock(std::chrono::steady_clock::time_point deadline);
  void remove_content() const noexcept;

  const std::string path_;
  const pid_t owner_;  // a process that this one forks does not remove the folder
  int lock_ = -1;      // an open file whose lock the job's processes share; the kernel releases it when one dies
  int folder_ = -1;
};

}  // namespace tessera
