#include "tessera/mesh/environment.h"

#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>

using tessera::Environment;
using tessera::EnvironmentVariables;
using tessera::resolve_environment;

namespace {

const EnvironmentVariables kTorchrun = {{"RANK", "5"},
                                        {"WORLD_SIZE", "8"},
                                        {"LOCAL_RANK", "1"},
                                        {"LOCAL_WORLD_SIZE", "4"},
                                        {"GROUP_RANK", "1"},
                                        {"GROUP_WORLD_SIZE", "2"},
                                        {"MASTER_ADDR", "node0"},
                                        {"MASTER_PORT", "29500"},
                                        {"ROLE_RANK", "5"},
                                        {"ROLE_WORLD_SIZE", "8"},
                                        {"TORCHELASTIC_RESTART_COUNT", "2"},
                                        {"TORCHELASTIC_RUN_ID", "none"},
                                        {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
const EnvironmentVariables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                                       {"OMPI_COMM_WORLD_SIZE", "4"},
                                       {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                       {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                                       {"PMIX_NAMESPACE", "12345"}};
const EnvironmentVariables kMpich = {
    {"PMI_RANK", "2"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}};
const EnvironmentVariables kSrun = {
    {"SLURM_PROCID", "3"},         {"SLURM_NTASKS", "6"},  {"SLURM_STEP_NUM_TASKS", "6"},
    {"SLURM_LOCALID", "1"},        {"SLURM_STEP_ID", "0"}, {"SLURM_JOB_ID", "77"},
    {"SLURM_STEP_NUM_NODES", "3"}, {"SLURM_NODEID", "1"},  {"SLURM_STEP_TASKS_PER_NODE", "2(x3)"}};

EnvironmentVariables with(EnvironmentVariables base, const EnvironmentVariables& changes) {
  for (const auto& [name, value] : changes) base[name] = value;
  return base;
}

EnvironmentVariables without(EnvironmentVariables base, const std::string& name) {
  base.erase(name);
  return base;
}

void check_place(const EnvironmentVariables& variables, const std::string& launcher, std::vector<int64_t> place) {
  CAPTURE(launcher);
  const Environment found = resolve_environment(variables);
  CHECK(found.launcher == launcher);
  CHECK(std::vector<int64_t>{found.rank, found.size, found.local_rank, found.local_size} == place);
}

void check_refused(const EnvironmentVariables& variables, const std::string& part) {
  CAPTURE(part);
  CHECK_THROWS_WITH_AS(resolve_environment(variables), doctest::Contains(part.c_str()), std::invalid_argument);
}

}  // namespace

TEST_CASE("each launcher's variables give rank, size, local rank and local size") {
  check_place({}, "none", {0, 1, 0, 1});
  check_place({{"HOME", "/"}, {"PATH", "/bin"}}, "none", {0, 1, 0, 1});
  check_place(kTorchrun, "torchrun", {5, 8, 1, 4});
  check_place(kOpenMpi, "Open MPI", {1, 4, 1, 4});
  check_place(kMpich, "MPICH", {2, 4, 0, 2});
  check_place(kSrun, "Slurm", {3, 6, 1, 2});
  check_place({{"TESSERA_RANK", "1"}, {"TESSERA_WORLD_SIZE", "3"}, {"TESSERA_STORE", "/tmp/s"}}, "TESSERA_*",
              {1, 3, 1, 3});
}

TEST_CASE("address, store, restarts and time limit are read as they are") {
  const Environment found = resolve_environment(with(kTorchrun, {{"TESSERA_TIMEOUT", "20"}}));
  CHECK(found.master_address == "node0");
  CHECK(found.master_port == 29500);
  CHECK(found.restart_count == 2);
  CHECK(found.agent_store);
  CHECK(found.timeout_seconds == 20);
  CHECK(found.store_path.empty());
  CHECK_FALSE(resolve_environment(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}})).agent_store);
  CHECK(resolve_environment({}).timeout_seconds == 300);
  CHECK(resolve_environment({{"TESSERA_STORE", "/a/b"}}).store_path == "/a/b");
  // Each restart has a folder of its own.
  CHECK(resolve_environment(with(kTorchrun, {{"TESSERA_RECORDS", "/r"}})).records_folder == "/r/restart_2");
  CHECK(resolve_environment(with(kTorchrun, {{"TESSERA_RECORDS", "/r"}, {"TORCHELASTIC_RESTART_COUNT", "0"}}))
            .records_folder == "/r");
  CHECK(resolve_environment(with(kTorchrun, {})).records_folder.empty());
}

TEST_CASE("the job's name comes from the launcher that counts, and differs between jobs") {
  CHECK(resolve_environment(kOpenMpi).job_id == "PMIX_NAMESPACE=12345");
  CHECK(resolve_environment(kSrun).job_id == "SLURM_JOB_ID=77 SLURM_STEP_ID=0");
  CHECK(resolve_environment(with(kSrun, {{"SLURM_STEP_ID", "1"}})).job_id == "SLURM_JOB_ID=77 SLURM_STEP_ID=1");
}

TEST_CASE("without local variables, ranks that meet in a file or at a loopback address are on one host") {
  check_place({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}}, "torchrun", {1, 2, 1, 2});
  check_place({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "localhost"}}, "torchrun", {1, 2, 1, 2});
  check_place({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"TESSERA_STORE", "/tmp/s"}}, "torchrun", {1, 2, 1, 2});
  check_place({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "node0"}}, "torchrun", {1, 2, 0, 1});
}

TEST_CASE("sets that agree are fine; the first in the order counts") {
  check_place(with(kOpenMpi, {{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"}}),
              "torchrun", {1, 4, 1, 4});
  check_place(with(kSrun, {{"PMI_RANK", "3"}, {"PMI_SIZE", "6"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}}),
              "MPICH", {3, 6, 1, 2});
}

TEST_CASE("local numbers come from a set that agrees where the first has none") {
  const EnvironmentVariables exported = {{"RANK", "3"}, {"WORLD_SIZE", "6"}, {"MASTER_ADDR", "node0"}};
  check_place(with(kSrun, exported), "torchrun", {3, 6, 1, 2});
  check_place(with(kOpenMpi, {{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "node0"}}), "torchrun", {1, 4, 1, 4});
  check_place(with(with(kSrun, exported), {{"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "3"}}), "torchrun", {3, 6, 0, 3});
  check_place(with(kSrun, {{"PMI_RANK", "3"}, {"PMI_SIZE", "6"}, {"RANK", "3"}, {"WORLD_SIZE", "6"}}), "torchrun",
              {3, 6, 1, 2});
}

TEST_CASE("where srun serves MPI by PMI-2, which gives no local numbers, Slurm's own set counts") {
  const EnvironmentVariables pmi2 = with(kSrun, {{"PMI_RANK", "3"}, {"PMI_SIZE", "6"}});
  const Environment plain = resolve_environment(kSrun), found = resolve_environment(pmi2);
  CHECK(found.launcher == "Slurm");
  CHECK(found.local_rank == plain.local_rank);
  CHECK(found.local_size == plain.local_size);
  CHECK(found.job_id == plain.job_id);
  // mpirun in a shell that srun has started: the PMI's set is that of the shell.
  const EnvironmentVariables shell = {
      {"SLURM_PROCID", "0"},         {"SLURM_LOCALID", "0"}, {"SLURM_STEP_ID", "1"}, {"SLURM_STEP_NUM_TASKS", "1"},
      {"SLURM_STEP_NUM_NODES", "1"}, {"PMI_RANK", "0"},      {"PMI_SIZE", "1"}};
  check_place(with(kOpenMpi, shell), "Open MPI", {1, 4, 1, 4});
}

TEST_CASE("TESSERA_* is explicit: it is compared with nothing") {
  check_place(with(kOpenMpi, {{"TESSERA_RANK", "0"}, {"TESSERA_WORLD_SIZE", "1"}}), "TESSERA_*", {0, 1, 0, 1});
  check_place(with(kSrun, {{"TESSERA_RANK", "2"},
                           {"TESSERA_WORLD_SIZE", "12"},
                           {"TESSERA_LOCAL_RANK", "2"},
                           {"TESSERA_LOCAL_WORLD_SIZE", "4"}}),
              "TESSERA_*", {2, 12, 2, 4});
}

TEST_CASE("Slurm's variables outside a step are one process") {
  check_place({{"SLURM_NTASKS", "8"}, {"SLURM_JOB_ID", "77"}}, "none", {0, 1, 0, 1});
  check_place({{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}}, "none", {0, 1, 0, 1});
  // The shell of salloc runs in a step of its own, which has one task, whatever the job has.
  check_place({{"SLURM_NTASKS", "8"},
               {"SLURM_PROCID", "0"},
               {"SLURM_LOCALID", "0"},
               {"SLURM_STEP_ID", "4294967290"},
               {"SLURM_STEP_NUM_TASKS", "1"},
               {"SLURM_STEP_NUM_NODES", "1"}},
              "Slurm", {0, 1, 0, 1});
  check_place(with(kOpenMpi, {{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}}), "Open MPI", {1, 4, 1, 4});
}

TEST_CASE("tasks of a Slurm step on this node") {
  const auto local_size = [](const std::string& tasks, const std::string& node) {
    return resolve_environment(with(kSrun, {{"SLURM_STEP_TASKS_PER_NODE", tasks}, {"SLURM_NODEID", node}})).local_size;
  };
  CHECK(local_size("3,2(x2)", "0") == 3);
  CHECK(local_size("2,3,4", "1") == 3);
  CHECK(local_size("2(x2),4", "2") == 4);
  const EnvironmentVariables old_slurm = without(kSrun, "SLURM_STEP_TASKS_PER_NODE");
  CHECK(resolve_environment(with(old_slurm, {{"SLURM_NTASKS_PER_NODE", "2"}})).local_size == 2);
  CHECK(resolve_environment(with(old_slurm, {{"SLURM_STEP_NUM_NODES", "1"}})).local_size == 6);
}

TEST_CASE("a Slurm step of one task per node holds the daemons of the launcher inside it, not ranks") {
  const EnvironmentVariables daemons = {{"SLURM_PROCID", "1"},
                                        {"SLURM_STEP_NUM_TASKS", "2"},
                                        {"SLURM_LOCALID", "0"},
                                        {"SLURM_STEP_NUM_NODES", "2"},
                                        {"SLURM_STEP_ID", "0"}};
  check_place(with(kTorchrun, daemons), "torchrun", {5, 8, 1, 4});
  check_place(
      with(kOpenMpi,
           with(daemons, {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_STEP_NUM_NODES", "1"}})),
      "Open MPI", {1, 4, 1, 4});
}

TEST_CASE("srun starts one torchrun per node: Slurm's variables, and those that it sets for MPI, are of that one") {
  // torchrun numbers the nodes in another order.
  const EnvironmentVariables alone =
      with(kTorchrun, {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}});
  const EnvironmentVariables task = {{"SLURM_PROCID", "0"},  {"SLURM_STEP_NUM_TASKS", "2"},
                                     {"SLURM_LOCALID", "0"}, {"SLURM_STEP_NUM_NODES", "2"},
                                     {"SLURM_NODEID", "0"},  {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"},
                                     {"SLURM_STEP_ID", "0"}};
  const EnvironmentVariables pmi2 = with(task, {{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}});
  for (const EnvironmentVariables& step : {task, pmi2, without(pmi2, "SLURM_STEP_TASKS_PER_NODE")}) {
    check_place(with(alone, step), "torchrun", {1, 2, 0, 1});
    check_place(with(kTorchrun, step), "torchrun", {5, 8, 1, 4});
  }
  // MPICH's mpiexec sets these, for one task per node.
  const EnvironmentVariables hydra = {
      {"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "1"}};
  check_place(with(alone, hydra), "torchrun", {1, 2, 0, 1});
  // Such a process is none of MPI's, also where the numbers are alike by chance.
  const EnvironmentVariables alike = with(pmi2, {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"PMIX_RANK", "0"}});
  CHECK(resolve_environment(with(alone, alike)).mpi.empty());
  // Without torchrun's own mark, and with several tasks per node, the sets contradict each other.
  check_refused(with(without(alone, "TORCHELASTIC_RUN_ID"), task), "torchrun and Slurm disagree");
  check_refused(with(without(alone, "TORCHELASTIC_RUN_ID"), hydra), "torchrun and MPICH disagree");
  check_refused(with(kTorchrun, kSrun), "torchrun and Slurm disagree");
  check_refused(with(kTorchrun, with(kSrun, {{"PMI_RANK", "3"}, {"PMI_SIZE", "6"}})), "torchrun and Slurm disagree");
  check_refused(with(kTorchrun, kMpich), "torchrun and MPICH disagree");
}

TEST_CASE("sets that disagree are an error that lists what was seen") {
  check_refused(
      with(kOpenMpi, {{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "localhost"}}),
      "torchrun and Open MPI disagree about this process: RANK=0, WORLD_SIZE=4 against OMPI_COMM_WORLD_RANK=1, "
      "OMPI_COMM_WORLD_SIZE=4");
  check_refused(with(kMpich, kSrun), "MPICH and Slurm disagree");
  check_refused(with(kOpenMpi, kMpich), "unset one set, or set TESSERA_RANK and TESSERA_WORLD_SIZE");
}

TEST_CASE("half a set, numbers that are none, and ranks out of range are errors with the values") {
  check_refused({{"RANK", "1"}}, "RANK=1 without WORLD_SIZE");
  check_refused({{"WORLD_SIZE", "4"}}, "WORLD_SIZE=4 without RANK");
  check_refused({{"OMPI_COMM_WORLD_SIZE", "4"}}, "OMPI_COMM_WORLD_SIZE=4 without OMPI_COMM_WORLD_RANK");
  check_refused({{"RANK", "one"}, {"WORLD_SIZE", "4"}}, "RANK='one' is not a whole number");
  check_refused({{"RANK", ""}, {"WORLD_SIZE", "4"}}, "RANK='' is not a whole number");
  check_refused({{"RANK", "1 "}, {"WORLD_SIZE", "4"}}, "RANK='1 ' is not a whole number");
  check_refused({{"RANK", "99999999999999999999"}, {"WORLD_SIZE", "4"}}, "is not a whole number");
  check_refused({{"RANK", "4"}, {"WORLD_SIZE", "4"}},
                "torchrun says RANK=4, WORLD_SIZE=4; a rank must be in [0, size)");
  check_refused({{"RANK", "-1"}, {"WORLD_SIZE", "4"}}, "RANK=-1");
  check_refused({{"RANK", "0"}, {"WORLD_SIZE", "0"}}, "WORLD_SIZE=0");
  check_refused(with(kTorchrun, {{"LOCAL_RANK", "4"}}), "LOCAL_RANK=4, LOCAL_WORLD_SIZE=4");
  check_refused(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "9"}}), "LOCAL_WORLD_SIZE=9");
  check_refused(without(kTorchrun, "LOCAL_WORLD_SIZE"), "set LOCAL_WORLD_SIZE");
  check_refused(without(kTorchrun, "LOCAL_RANK"), "but not which of this host's 4 ranks this is; set LOCAL_RANK too");
  check_refused(with(kTorchrun, {{"MASTER_PORT", "70000"}}), "MASTER_PORT=70000 is not in [1, 65535]");
  check_refused(with(kTorchrun, {{"TESSERA_TIMEOUT", "0"}}), "TESSERA_TIMEOUT=0 is not in [1, 1000000] seconds");
  check_refused(with(kTorchrun, {{"TORCHELASTIC_RESTART_COUNT", "x"}}), "TORCHELASTIC_RESTART_COUNT='x'");
  check_refused(with(kTorchrun, {{"TESSERA_SECRET", ""}}),
                "TESSERA_SECRET is set and empty, so nothing would be signed");
  check_refused(with(kTorchrun, {{"TESSERA_SECRET_FILE", ""}}), "TESSERA_SECRET_FILE is set and empty");
  check_refused(with(kSrun, {{"SLURM_STEP_TASKS_PER_NODE", "two"}}), "SLURM_STEP_TASKS_PER_NODE='two'");
}

TEST_CASE("loopback addresses") {
  for (const char* address : {"localhost", "127.0.0.1", "127.9.8.7", "::1"}) CHECK(tessera::is_loopback(address));
  for (const char* address : {"", "node0", "10.0.0.1", "0.0.0.0", "1127.0.0.1"})
    CHECK_FALSE(tessera::is_loopback(address));
}

TEST_CASE("the launcher of MPI counts where it gave this process the place that counts") {
  CHECK(resolve_environment(kOpenMpi).mpi == "Open MPI");
  CHECK(resolve_environment(kMpich).mpi == "MPICH");
  CHECK(resolve_environment(with(kSrun, {{"PMIX_RANK", "3"}})).mpi == "PMIx");
  CHECK(resolve_environment(kTorchrun).mpi.empty());
  CHECK(resolve_environment({}).mpi.empty());
  // tools/launch --backend mpi sets these.
  CHECK(resolve_environment(with(kOpenMpi, {{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"TESSERA_STORE", "/tmp/s"}})).mpi ==
        "Open MPI");
  // A world that is given explicitly inside an MPI job is not that job.
  CHECK(
      resolve_environment(with(kOpenMpi, {{"TESSERA_RANK", "0"}, {"TESSERA_WORLD_SIZE", "2"}, {"TESSERA_STORE", "/s"}}))
          .mpi.empty());
}

TEST_CASE("TESSERA_BACKEND is read, and must fit how the process was started") {
  CHECK(resolve_environment(kOpenMpi).backend.empty());
  CHECK(resolve_environment(with(kOpenMpi, {{"TESSERA_BACKEND", "gloo"}})).backend == "gloo");
  CHECK(resolve_environment(with(kOpenMpi, {{"TESSERA_BACKEND", "mpi"}})).backend == "mpi");
  CHECK(resolve_environment(with(kSrun, {{"PMIX_RANK", "3"}, {"TESSERA_BACKEND", "mpi"}})).backend == "mpi");
  // A process alone has no other process to reach.
  CHECK(resolve_environment({{"TESSERA_BACKEND", "mpi"}}).backend == "mpi");
  check_refused(with(kOpenMpi, {{"TESSERA_BACKEND", "MPI"}}), "TESSERA_BACKEND=MPI is no backend; set mpi or gloo");
  check_refused(
      with(kTorchrun, {{"TESSERA_BACKEND", "mpi"}}),
      "TESSERA_BACKEND=mpi, but no MPI started this process as rank 5 of 8 (torchrun did: RANK=5, WORLD_SIZE=8, "
      "LOCAL_RANK=1, LOCAL_WORLD_SIZE=4; variables of MPI: none); start it with mpirun or tools/launch --backend mpi");
  check_refused(with(kOpenMpi, {{"TESSERA_RANK", "0"}, {"TESSERA_WORLD_SIZE", "2"}, {"TESSERA_BACKEND", "mpi"}}),
                "variables of MPI: OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=4)");
  CHECK(resolve_environment({}).cuda_backend.empty());
  CHECK(resolve_environment(with(kTorchrun, {{"TESSERA_CUDA_BACKEND", "gloo"}})).cuda_backend == "gloo");
  check_refused({{"TESSERA_CUDA_BACKEND", "mpi"}},
                "TESSERA_CUDA_BACKEND=mpi is no backend for CUDA tensors; set nccl or gloo");
}
