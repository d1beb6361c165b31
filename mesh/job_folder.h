#pragma once

#include <string>

namespace tessera {

// Holds a folder in which the ranks of one host find each other. It belongs to this user and one job and has mode 0700:
//   $TMPDIR/tessera-UID/HASH_OF_JOB
// The first process of the job empties the folder, since files in it are left from an earlier job of the same name that
// crashed. The last process removes it.
//
// Throws std::runtime_error when the folder cannot be made, belongs to another user, or has another mode.
class JobFolder {
 public:
  explicit JobFolder(const std::string& job_id);
  ~JobFolder();
  JobFolder(const JobFolder&) = delete;
  JobFolder& operator=(const JobFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  bool lock();
  void remove_content() const noexcept;

  std::string path_;
  int lock_ = -1;  // an open file whose lock the job's processes share; the kernel releases it when one dies
};

}  // namespace tessera
