#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/dtensor/io/file_descriptor.h"

namespace tessera {

// Returns the name of a step's folder: "step_00000100".
std::string step_folder_name(int64_t step);

// Returns the folders of `folder` that step_folder_name names, by step. There is none if `folder` is none. Throws
// std::system_error where the system refuses to list it: a process without a file descriptor left must not begin anew.
std::map<int64_t, std::string> step_folders(const std::string& folder);

// Throws DamagedFile, with the reason, unless the training state in `step_folder` is whole: its state.json can be read,
// has its checksum, and names files that are there with their sizes. What is in the files is verified when they are
// read. An older state must not be taken for the newest, so other errors are thrown as they are: OtherVersion, and
// std::system_error where the system refuses to read what is there, unless that means damage (see means_damage).
void check_whole_state(const std::string& step_folder);
// Says whether check_whole_state does not throw DamagedFile. Throws what else that throws.
bool is_whole_state(const std::string& step_folder);

// Exchanges the names of two folders at once, and returns 0; or returns -1 and sets errno.
using ExchangeNames = int (*)(const char* a, const char* b);
// Is the one of the system.
int exchange_names(const char* a, const char* b);

// Says who saves a state: these ranks of the job that job_name() of mesh/failure.h names. An empty name tells nothing.
struct SavedBy {
  std::string job;
  std::vector<int64_t> ranks;
};

// Makes a folder that appears under its name all at once: files are written into `path()`, a hidden folder beside it of
// a new name (".step_00000100.tmp-<random>"), which publish() renames. Without publish() the destructor removes it. Two
// jobs never share one. A live process holds a lock on the file ".saved_by" in its folder, since NFS locks files alone;
// the constructor removes the folders that killed processes left behind. On a file system without locks they stay.
//
// Members throw std::runtime_error with the path and the system's text when the system refuses. A state that other
// ranks of the same job have saved is not replaced, since half of a model would be lost: the constructor, and publish()
// where those ranks were faster, throw std::invalid_argument.
class NewStepFolder {
 public:
  // Makes `folder` if it is not there, and writes its name to disk.
  NewStepFolder(const std::string& folder, int64_t step, const SavedBy& by = {});
  NewStepFolder(const NewStepFolder&) = delete;
  NewStepFolder& operator=(const NewStepFolder&) = delete;
  ~NewStepFolder();

  const std::string& path() const { return path_; }
  // Returns the last part of path(), at most 60 bytes.
  std::string name() const { return path_.substr(path_.rfind('/') + 1); }

  // Writes the names in the folder to disk and gives the folder its name. A folder that had that name is exchanged for
  // it at once and then removed. Where `exchange` says that the file system cannot do that, as that of NFS cannot, the
  // older folder is renamed first, to a hidden name that the next save would sweep: a process that is killed between
  // these two renames leaves no folder of this name.
  void publish(ExchangeNames exchange = exchange_names);

 private:
  std::string folder_;
  std::string target_;
  std::string by_;
  std::string path_;
  FileDescriptor lock_;
};

// Looks at the steps of `folder` up to `saved`, and removes those that are older than the `keep` newest whole ones; 0
// keeps all. Steps above `saved`, which a run that has gone back has left, stay, and do not count. It keeps all too
// where the system refuses to read them, or one has another version: the next save removes more. A state that cannot be
// removed stays, with a warning. A folder is renamed before its files are removed, so that part of a state never stands
// under a step's name.
void keep_newest_steps(const std::string& folder, int64_t keep, int64_t saved);

}  // namespace tessera
