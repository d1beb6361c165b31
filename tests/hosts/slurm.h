#pragma once

#include <string>

#include "tessera/tests/hosts/hosts.h"

namespace tessera::testing {

// Runs Slurm on hosts: munge and slurmd on each of them, slurmctld on the first. All of it ends with the hosts.
class Slurm {
 public:
  // Returns why this machine has no Slurm, or "".
  static std::string why_not();
  // Throws std::runtime_error, with Slurm's own logs, when not every host is idle after half a minute.
  explicit Slurm(const Hosts& hosts);

  // Returns the start of a line that runs a program on the first host by srun, two ranks on each host.
  std::string srun() const;

 private:
  const Hosts& hosts_;
};

}  // namespace tessera::testing
