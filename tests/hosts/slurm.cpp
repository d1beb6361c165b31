#include "tessera/tests/hosts/slurm.h"

#include <cstdint>
#include <fstream>
#include <stdexcept>

#include <fmt/format.h>

#include "tessera/tests/harness/shell.h"
#include "tessera/tests/hosts/ranks_on_hosts.h"

namespace tessera::testing {
namespace {

// Without task/none, proctrack/pgid and the name of a version, slurmd would look for cgroups in /sys.
constexpr const char* kConfiguration = R"(ClusterName=hosts
SlurmctldHost=host0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge.socket
CredType=cred/munge
StateSaveLocation={0}/slurm_state
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={0}/slurmctld.log
SlurmdLogFile={0}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
)";

void write_configuration(const Hosts& hosts) {
  std::ofstream file(hosts.folder() + "/slurm.conf");
  file << fmt::format(fmt::runtime(kConfiguration), hosts.folder());
  for (int64_t host = 0; host < hosts.count(); ++host) {
    file << fmt::format("NodeName={} NodeAddr={} CPUs={} State=UNKNOWN\n", Hosts::name(host), Hosts::address(host),
                        kRanksPerHost);
  }
  file << "PartitionName=all Nodes=ALL Default=YES State=UP\n";
  std::ofstream(hosts.folder() + "/cgroup.conf") << "CgroupPlugin=cgroup/v1\n";
}

std::string with_configuration(const Hosts& hosts) {
  return fmt::format("export SLURM_CONF={}/slurm.conf; ", hosts.folder());
}

void must(const HostOutcome& outcome) {
  if (outcome.exit_code != 0) throw std::runtime_error("Slurm does not start: " + outcome.text());
}

}  // namespace

std::string Slurm::why_not() {
  for (const char* program : {"munged", "slurmctld", "slurmd", "srun"}) {
    if (shell(fmt::format("command -v {}", program)).exit_code == 0) continue;
    return fmt::format("there is no program {}; run tools/setup --full", program);
  }
  return "";
}

Slurm::Slurm(const Hosts& hosts) : hosts_(hosts) {
  write_configuration(hosts);
  const std::string folder = hosts.folder();
  must(hosts.run(0, fmt::format("mkdir {0}/slurm_state && head -c 128 /dev/urandom > {0}/munge.key && chmod 600 "
                                "{0}/munge.key",
                                folder)));
  for (int64_t host = 0; host < hosts.count(); ++host) {
    // munged refuses to keep its socket and its seed where others could replace them.
    must(hosts.run(host, fmt::format("munged --force --socket /run/munge.socket --key-file {}/munge.key --pid-file "
                                     "/run/munged.pid --log-file /run/munged.log --seed-file /run/munge.seed",
                                     folder)));
  }
  must(hosts.run(0, with_configuration(hosts) + "slurmctld"));
  for (int64_t host = 0; host < hosts.count(); ++host) {
    must(hosts.run(host, with_configuration(hosts) + "mkdir /run/slurmd && slurmd -N " + Hosts::name(host)));
  }
  const HostOutcome idle = hosts.run(
      0, with_configuration(hosts) +
             fmt::format("for i in $(seq 60); do [ $(sinfo --noheader --Node --states=idle | wc -l) = {} ] && "
                         "exit; sleep 0.5; done; tail -n 20 {}/slurm*.log; exit 1",
                         hosts.count(), folder));
  must(idle);
}

std::string Slurm::srun() const {
  return with_configuration(hosts_) +
         fmt::format(
             "export MASTER_ADDR={} MASTER_PORT=29400 OMP_NUM_THREADS=1; exec timeout 90 srun --nodes={} "
             "--ntasks={} ",
             Hosts::name(0), hosts_.count(), hosts_.count() * kRanksPerHost);
}

}  // namespace tessera::testing
