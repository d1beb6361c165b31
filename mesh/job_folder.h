#pragma once

#include <string>

namespace tessera {

// A folder of this user and one job, mode 0700, in which the ranks of one host meet, held as long as this object lives:
//   $TMPDIR/tessera-UID/HASH_OF_JOB
// The first process to come empties it: what lies there is then left from an earlier job of the same name that ended
// badly. The last process to leave removes it.
//
// Throws std::runtime_error when the folder cannot be made, or belongs to somebody else.
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
  int lock_ = -1;  // a file whose lock the processes inside share; the kernel frees it when one dies
};

}  // namespace tessera
