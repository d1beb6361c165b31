#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/tests/hosts/hosts.h"

namespace tessera::testing {

inline constexpr int64_t kRanksPerHost = 2;

// Holds the ranks of a job, which a user has started by hand on each host, and how they ended.
class RanksOnHosts {
 public:
  // Starts two ranks of `command` on each host, of which rank 0 serves the store on host 0, unless `variables` says
  // otherwise. They are ended after `limit` seconds.
  RanksOnHosts(const Hosts& hosts, const std::string& command, std::map<std::string, std::string> variables = {},
               int64_t limit = 60);

  // Returns whether every rank prints a line that begins with `start` within 30 seconds.
  bool all_say(const std::string& start) const;
  // Waits for every rank.
  const std::vector<HostOutcome>& wait();
  // Returns what all have said, after wait().
  std::string text() const;

 private:
  std::vector<HostProcess> processes_;
  std::vector<HostOutcome> outcomes_;
};

}  // namespace tessera::testing
