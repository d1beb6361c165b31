#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace tessera {

using EnvironmentVariables = std::map<std::string, std::string>;

// What the environment of a process says about its place in a job. A value; made by resolve_environment.
struct Environment {
  std::string launcher = "none";  // "none", "TESSERA_*", "torchrun", "Open MPI", "MPICH", "Slurm"
  int64_t rank = 0;
  int64_t size = 1;
  int64_t local_rank = 0;
  int64_t local_size = 1;

  // Where the ranks find each other. At most one of the three forms is used; see make_store.
  std::string store_path;      // TESSERA_STORE: a file that all ranks open
  std::string master_address;  // MASTER_ADDR
  int64_t master_port = 0;     // MASTER_PORT
  std::string job_id;          // the launcher's name for this job, when it has one

  bool agent_store = false;   // TORCHELASTIC_USE_AGENT_STORE: the server is torchrun's, every rank is a client
  int64_t restart_count = 0;  // TORCHELASTIC_RESTART_COUNT

  std::string
      mpi;  // the launcher of MPI processes that gave this process the same place: "Open MPI", "MPICH", "PMIx"; or ""
  std::string backend;  // TESSERA_BACKEND: "mpi", "gloo"; empty: not said

  int64_t timeout_seconds = 300;  // TESSERA_TIMEOUT: for everything that waits

  bool checked = false;  // TESSERA_CHECKED: 1 checks every collective; see mesh/collectives/checked.h

  bool one_host() const { return local_size == size; }
  friend bool operator==(const Environment&, const Environment&) = default;
};

// Reads a job's description from environment variables. Pure: no process, no file, no network is touched.
//
// The first of these that is there wins:
//   TESSERA_*  TESSERA_RANK, TESSERA_WORLD_SIZE [, TESSERA_LOCAL_RANK, TESSERA_LOCAL_WORLD_SIZE]
//   torchrun   RANK, WORLD_SIZE [, LOCAL_RANK, LOCAL_WORLD_SIZE]
//   Open MPI   OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
//   MPICH      PMI_RANK, PMI_SIZE [, MPI_LOCALRANKID, MPI_LOCALNRANKS]
//   Slurm      SLURM_PROCID and SLURM_STEP_NUM_TASKS (or SLURM_NTASKS, SLURM_NPROCS), only inside a step
//              (SLURM_STEP_ID): a plain salloc or sbatch shell has SLURM_NTASKS too and is one process
// TESSERA_* is explicit and is compared with nothing. The others must agree on rank and size where several are there; a
// Slurm step of one task a node that runs another launcher holds that launcher's daemons, not ranks, and is left out.
// Without local variables all ranks count as on one host when they meet in a file or at a loopback address.
//
// Throws std::invalid_argument, listing what was seen, on sets that disagree, half a set, numbers that are not numbers,
// ranks outside [0, size), and TESSERA_BACKEND=mpi for several processes that no launcher of MPI has placed so.
Environment resolve_environment(const EnvironmentVariables& variables);

// TESSERA_CHECKED: 1 is true; 0, empty and not there are false. Throws std::invalid_argument on other values.
bool checked_by(const EnvironmentVariables& variables);

// The variables of this process.
EnvironmentVariables process_environment();

// True for "localhost", 127.0.0.0/8 and "::1".
bool is_loopback(const std::string& address);

}  // namespace tessera
