// Starts jobs on several hosts as users do: by hand, by torchrun, by mpirun and by Slurm.
#include <cstdint>
#include <cstdlib>
#include <string>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/tests/harness/over_mpi.h"
#include "tessera/tests/harness/shell.h"
#include "tessera/tests/harness/skip.h"
#include "tessera/tests/harness/text.h"
#include "tessera/tests/hosts/ranks_on_hosts.h"
#include "tessera/tests/hosts/slurm.h"
#include "tessera/tests/train/text_folder.h"

using namespace tessera::testing;

namespace {

const std::string kEndsWell = "tests/mesh/failing_job 'ends well'";
const std::string kReduces = "tests/hosts/host_job 1";

void check_success(const HostOutcome& outcome) {
  const std::string text = outcome.text();
  CAPTURE(text);
  CHECK(outcome.exit_code == 0);
}

void check_success(RanksOnHosts job) {
  job.wait();
  const std::string text = job.text();
  CAPTURE(text);
  for (const HostOutcome& outcome : job.wait()) CHECK(outcome.exit_code == 0);
}

int64_t count_of(const std::string& text, const std::string& part) {
  int64_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// Starts torchrun on each host and checks that every rank has reduced over all of them.
void check_torchrun(const Hosts& hosts, const std::string& program, const std::string& say) {
  std::vector<HostProcess> agents;
  for (int64_t host = 0; host < hosts.count(); ++host) {
    agents.push_back(hosts.start(
        host, fmt::format("timeout 90 {} -m torch.distributed.run --no-python --nnodes {} --nproc_per_node {} "
                          "--rdzv_backend c10d --rdzv_id hosts --rdzv_endpoint {}:29500 {}",
                          std::getenv("PYTHON"), hosts.count(), kRanksPerHost, Hosts::address(0), program)));
  }
  for (HostProcess& agent : agents) {
    const HostOutcome outcome = agent.wait();
    check_success(outcome);
    if (!say.empty()) CHECK(count_of(outcome.text(), say) == kRanksPerHost);
  }
}

// Returns the start of a line that runs a program by mpirun, two ranks on each host, which an agent enters as ssh does.
std::string mpirun(const Hosts& hosts, const std::string& variables) {
  std::string where;
  for (int64_t host = 0; host < hosts.count(); ++host) {
    where += fmt::format("{}{}:{}", host == 0 ? "" : ",", Hosts::address(host), kRanksPerHost);
  }
  return fmt::format(
      "timeout 60 mpirun --allow-run-as-root --oversubscribe --mca plm_rsh_agent {} --mca plm_rsh_no_tree_spawn 1 "
      "--mca oob_tcp_if_include 10.77.0.0/24 --mca btl_tcp_if_include 10.77.0.0/24 --host {} -np {} "
      "-x MASTER_ADDR={} -x MASTER_PORT=29400 -x OMP_NUM_THREADS=1 {} ",
      hosts.agent(), where, hosts.count() * kRanksPerHost, Hosts::address(0), variables);
}

std::string training(const Hosts& hosts, const std::string& arguments) {
  return fmt::format(
      "examples/train/train --run {0}/run --data {0}/data --hidden 16 --layers 2 --heads 4 --sequence 16 --batch 8 "
      "--steps 6 --warm-up 2 --log-every 1 --progress plain {1}",
      hosts.folder(), arguments);
}

}  // namespace

#define TESSERA_SKIP_WITHOUT_HOSTS() \
  if (!Hosts::why_not().empty()) TESSERA_SKIP_MISSING(Hosts::why_not())

TEST_CASE("a job is started by hand on two and on three hosts, with a secret and without") {
  TESSERA_SKIP_WITHOUT_HOSTS();
  for (const int64_t count : {2, 3}) {
    const Hosts hosts(count);
    check_success(RanksOnHosts(hosts, kEndsWell));
    check_success(RanksOnHosts(hosts, kReduces, {{"TESSERA_SECRET", "the ranks' own"}}));
  }
}

TEST_CASE("a job is started by torchrun on two and on three hosts") {
  TESSERA_SKIP_WITHOUT_HOSTS();
  for (const int64_t count : {2, 3}) {
    const Hosts hosts(count);
    check_torchrun(hosts, kEndsWell, "");
    check_torchrun(hosts, kReduces, fmt::format("of 1 MiB over {} ranks", count * kRanksPerHost));
  }
}

TEST_CASE("a job is started by mpirun on two and on three hosts, over MPI and over Gloo") {
  TESSERA_SKIP_WITHOUT_HOSTS();
  if (!why_no_mpi().empty()) TESSERA_SKIP_MISSING(why_no_mpi());
  for (const int64_t count : {2, 3}) {
    const Hosts hosts(count);
    for (const std::string backend : {"mpi", "gloo"}) {
      CAPTURE(backend);
      const std::string start = mpirun(hosts, "-x TESSERA_BACKEND=" + backend);
      check_success(hosts.start_outside(start + kEndsWell).wait());
      const HostOutcome reduced = hosts.start_outside(start + kReduces).wait();
      check_success(reduced);
      CHECK(count_of(reduced.text(), fmt::format("of 1 MiB over {} ranks", count * kRanksPerHost)) ==
            count * kRanksPerHost);
    }
  }
}

TEST_CASE("a job is started by Slurm on two and on three hosts") {
  TESSERA_SKIP_WITHOUT_HOSTS();
  if (!Slurm::why_not().empty()) TESSERA_SKIP_MISSING(Slurm::why_not());
  for (const int64_t count : {2, 3}) {
    const Hosts hosts(count);
    const Slurm slurm(hosts);
    check_success(hosts.run(0, slurm.srun() + kEndsWell));
    const HostOutcome reduced = hosts.run(0, slurm.srun() + kReduces);
    check_success(reduced);
    CHECK(count_of(reduced.text(), fmt::format("of 1 MiB over {} ranks", count * kRanksPerHost)) ==
          count * kRanksPerHost);
  }
}

TEST_CASE(
    "a training run on three hosts is started by torchrun, resumed on another mesh by hand, and on a third one by "
    "Slurm") {
  TESSERA_SKIP_WITHOUT_HOSTS();
  if (!Slurm::why_not().empty()) TESSERA_SKIP_MISSING(Slurm::why_not());
  const Hosts hosts(3);
  write_text_folder(hosts.folder() + "/data", 12);
  // torchrun takes the program's own --run for an abbreviation of its --run-path, and refuses it.
  check_torchrun(hosts, "bash -c " + quoted(training(hosts, "--mesh dp=3,tp=2 --stop-at 2")), "");
  check_success(RanksOnHosts(hosts, training(hosts, "--resume --mesh dp=6 --stop-at 4")));
  const Slurm slurm(hosts);
  const HostOutcome last = hosts.run(0, slurm.srun() + training(hosts, "--resume --mesh dp=2,tp=3"));
  check_success(last);
  const std::string text = last.text();
  CAPTURE(text);
  CHECK(contains(text, "step 6/6  loss "));
  CHECK(contains(text, "largest difference from one process: "));
}
