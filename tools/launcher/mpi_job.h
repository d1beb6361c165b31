#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/tools/launcher/private_folder.h"
#include "tessera/tools/launcher/spawn.h"

namespace tessera {

// Reserves places for ranks in one MPI job on this host. The caller starts the ranks itself.
//
// Open MPI's mpirun starts a shell for each rank, which writes its environment variables to a file and then waits. MPI
// takes any process that has these variables as that rank, whatever its parent is. So ranks over MPI are started,
// watched and ended like all others, and after a failure the other ranks have time to report it: mpirun would kill them
// at once.
//
// mpirun listens for daemons on other hosts, on every interface, and has no setting against it: oob_tcp_if_include says
// only which addresses it tells others. A library that is preloaded into it (loopback_alone.cpp) keeps it to the
// loopback interface, where its PMIx server listens by itself.
class MpiJob {
 public:
  // Returns why nobody needs the places any more, such as "signal 15 came", or "".
  using WhyOver = std::function<std::string()>;

  // Throws std::runtime_error, with mpirun's output, when there is no mpirun, when it provides no further place for 30
  // seconds, and when `why_over`, which is asked all the while, returns a reason. Then mpirun gets SIGTERM,
  // and is killed after 3 seconds.
  explicit MpiJob(int64_t size, const WhyOver& why_over = {});
  // Ends mpirun, and kills it after 3 seconds. The ranks must have ended.
  ~MpiJob();
  MpiJob(const MpiJob&) = delete;
  MpiJob& operator=(const MpiJob&) = delete;

  // Returns the variables for one rank: those of mpirun, and TESSERA_BACKEND=mpi.
  std::map<std::string, std::string> variables(int64_t rank) const;
  // Returns the lines that mpirun has written since the last call. Call it again and again while the ranks run, so that
  // mpirun need not wait until somebody reads, and once when they have ended.
  std::vector<std::string> new_lines();

 private:
  std::string file_of(int64_t rank) const;
  void wait_for_places(int64_t size, const WhyOver& why_over);
  bool has_ended();
  void end();
  std::string output() const;

  const PrivateFolder folder_;
  std::optional<PrivateFolder> shared_memory_;  // for the ranks' shared memory, in /dev/shm; none if it cannot be made
  int preloaded_ = -1;                          // a file in memory: the library that is preloaded into mpirun
  int hold_ = -1;                               // the shells wait until no process has this pipe open
  Child mpirun_;
  std::array<std::string, 2> begun_;  // the line that mpirun has begun on each of its streams
};

// Is where the ranks' shared memory lies.
inline constexpr const char* kSharedMemory = "/dev/shm";

// Returns whether PATH has an mpirun.
bool has_mpirun();

}  // namespace tessera
