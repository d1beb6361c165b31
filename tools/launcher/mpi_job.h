#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "tessera/tools/launcher/private_folder.h"
#include "tessera/tools/launcher/spawn.h"

namespace tessera {

// Places for ranks in one MPI job on this host; the ranks themselves are started by whoever holds it.
//
// Open MPI's mpirun starts, for each rank, a shell that writes down the variables it was given and then waits. A
// process that has these variables is that rank to MPI, whoever its parent is. So ranks over MPI are started, watched
// and ended as all others are, and a rank that fails leaves the others the time to say why: mpirun would kill them at
// once.
class MpiJob {
 public:
  // Throws std::runtime_error, with what mpirun wrote, when there is none or it does not give the places within 30
  // seconds.
  explicit MpiJob(int64_t size);
  // Ends mpirun: the ranks have ended.
  ~MpiJob();
  MpiJob(const MpiJob&) = delete;
  MpiJob& operator=(const MpiJob&) = delete;

  // Of one rank: those of mpirun, and TESSERA_BACKEND=mpi.
  std::map<std::string, std::string> variables(int64_t rank) const;

 private:
  std::string file_of(int64_t rank) const;
  void wait_for_places(int64_t size);
  bool has_ended();
  void end();
  std::string output() const;

  const PrivateFolder folder_;
  const std::string shared_memory_;  // a folder for the ranks' own, in /dev/shm; empty where there can be none
  int hold_ = -1;                    // the shells wait until nobody has this open
  Child mpirun_;
};

// Whether PATH has an mpirun.
bool has_mpirun();

}  // namespace tessera
