#pragma once

#include <chrono>
#include <string>

#include <sys/types.h>

namespace tessera {

// Returns $TMPDIR/tessera-UID/HASH_OF_JOB, a folder for the ranks of one host and one job. Makes the folder around it,
// with mode 0700, and removes from it the folders of jobs that were killed. Throws std::runtime_error when that cannot
// be made, belongs to another user, or has another mode.
std::string folder_of_job(const std::string& job_id);

// Holds a folder in which the ranks of a job on one host find each other: a FolderStore's. It belongs to this user and
// has mode 0700. The first process of the job removes what an earlier job that crashed has left there; the last process
// removes the folder.
//
// The job's processes share a lock of the folder itself (flock), which the kernel releases when one dies. Whoever holds
// it alone may remove files: the first, before it shares the lock, and the last.
class JobFolder {
 public:
  // Makes the folder unless it is there. Throws std::runtime_error when it cannot be made, belongs to another user, has
  // another mode or holds a file that is not a FolderStore's, and when a stopped process keeps its lock for `patience`.
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
  bool open_folder();
  bool share_lock(std::chrono::steady_clock::time_point deadline);
  void close_folder();

  const std::string path_;
  const pid_t owner_;  // a process that this one forks does not remove the folder
  int folder_ = -1;
};

// Says whether FolderStore gives a file this name.
bool is_store_file(const std::string& name);

}  // namespace tessera
