#pragma once

#include <cstdint>
#include <string>

#include "tessera/mesh/environment_variables.h"

namespace tessera {

// Describes this process's place in a job, as its environment variables give it. A value; resolve_environment makes it.
struct Environment {
  std::string launcher = "none";  // "none", "TESSERA_*", "torchrun", "Open MPI", "MPICH", "Slurm"
  int64_t rank = 0;
  int64_t size = 1;
  int64_t local_rank = 0;
  int64_t local_size = 1;

  // These say where the ranks find each other. make_store (mesh/store.h) uses one of them.
  std::string store_path;      // TESSERA_STORE: path of a folder that the ranks make
  std::string master_address;  // MASTER_ADDR
  int64_t master_port = 0;     // MASTER_PORT
  std::string job_id;          // the launcher's identifier of this job on this host, or empty
  std::string job_key;         // TESSERA_JOB, else the launcher's identifier of this job on all hosts, or empty

  // These say how values are signed in a store on several hosts; see mesh/store.h.
  std::string secret;       // TESSERA_SECRET
  std::string secret_file;  // TESSERA_SECRET_FILE: path of a file that holds the secret

  bool agent_store = false;   // TORCHELASTIC_USE_AGENT_STORE: torchrun serves the store, and every rank is a client
  int64_t restart_count = 0;  // TORCHELASTIC_RESTART_COUNT

  std::string mpi;  // the MPI launcher that gave this process the same place: "Open MPI", "MPICH", "PMIx"; or ""
  std::string cuda_backend;  // TESSERA_CUDA_BACKEND: "nccl" or "gloo"; empty when it is not set
  std::string backend;       // TESSERA_BACKEND: "mpi" or "gloo"; empty when it is not set

  // TESSERA_RECORDS: where each rank writes its recorder's records when the job fails. After restarts it is a folder in
  // that one, "restart_2", so that the records of each attempt stay.
  std::string records_folder;

  int64_t timeout_seconds = 300;  // TESSERA_TIMEOUT: limit of every wait for other ranks

  bool checked = false;  // TESSERA_CHECKED: 1 checks every collective; see mesh/collectives/checked.h

  bool one_host() const { return local_size == size; }
  friend bool operator==(const Environment&, const Environment&) = default;
};

// Reads this process's place in a job from environment variables. Touches no process, file or network.
//
// The first of these sets whose variables are present is used:
//   TESSERA_*  TESSERA_RANK, TESSERA_WORLD_SIZE [, TESSERA_LOCAL_RANK, TESSERA_LOCAL_WORLD_SIZE]
//   torchrun   RANK, WORLD_SIZE [, LOCAL_RANK, LOCAL_WORLD_SIZE]
//   Open MPI   OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
//   MPICH      PMI_RANK, PMI_SIZE [, MPI_LOCALRANKID, MPI_LOCALNRANKS]
//   Slurm      SLURM_PROCID and SLURM_STEP_NUM_TASKS (or SLURM_NTASKS, SLURM_NPROCS), only inside a step
//              (SLURM_STEP_ID): a plain salloc or sbatch shell has SLURM_NTASKS too and is one process
// TESSERA_* is explicit and is compared with nothing. The other sets must agree on rank and size where several are
// present; where the first of them has no local numbers, those of the next one that has some count. A Slurm step with
// one task per node in which another launcher has started more ranks holds that launcher's daemons, not ranks, and is
// ignored. So are the sets of Slurm and MPICH where they describe one task on this node, in which torchrun itself
// (TORCHELASTIC_RUN_ID) has started this process, as in `srun --ntasks-per-node=1 torchrun`. Without any local numbers
// all ranks count as being on one host when TESSERA_STORE is set or MASTER_ADDR is a loopback address; otherwise each
// rank counts as alone on its host.
//
// Throws std::invalid_argument, listing the variables seen, on sets that disagree, an incomplete set, values that are
// not whole numbers, ranks outside [0, size), and TESSERA_BACKEND=mpi for several processes to which no MPI launcher
// gave this rank and size.
Environment resolve_environment(const EnvironmentVariables& variables);

// Returns the value of TESSERA_CHECKED: 1 is true; 0, empty and unset are false. Throws std::invalid_argument on other
// values.
bool checked_by(const EnvironmentVariables& variables);

// Returns the folder of TESSERA_RECORDS, as Environment::records_folder has it, or "" where it is unset or empty.
// Throws std::invalid_argument where TORCHELASTIC_RESTART_COUNT is no number.
std::string records_folder_by(const EnvironmentVariables& variables);

// Returns true for "localhost", 127.0.0.0/8 and "::1".
bool is_loopback(const std::string& address);

}  // namespace tessera
