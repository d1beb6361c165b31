#include "tessera/tests/hosts/ranks_on_hosts.h"

#include <algorithm>
#include <chrono>

#include <fmt/format.h>

namespace tessera::testing {
namespace {

std::map<std::string, std::string> place(const Hosts& hosts, int64_t rank) {
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(hosts.count() * kRanksPerHost)},
          {"LOCAL_RANK", std::to_string(rank % kRanksPerHost)},
          {"LOCAL_WORLD_SIZE", std::to_string(kRanksPerHost)},
          {"MASTER_ADDR", Hosts::name(0)},
          {"MASTER_PORT", "29400"},
          {"OMP_NUM_THREADS", "1"}};
}

}  // namespace

RanksOnHosts::RanksOnHosts(const Hosts& hosts, const std::string& command, std::map<std::string, std::string> variables,
                           int64_t limit) {
  for (int64_t rank = 0; rank < hosts.count() * kRanksPerHost; ++rank) {
    std::map<std::string, std::string> all = variables;
    all.merge(place(hosts, rank));
    std::string whole = "exec env";
    for (const auto& [name, value] : all) whole += fmt::format(" {}={}", name, quoted(value));
    processes_.push_back(
        hosts.start(rank / kRanksPerHost, fmt::format("{} timeout --signal=KILL {} {}", whole, limit, command)));
  }
}

bool RanksOnHosts::all_say(const std::string& start) const {
  const auto says = [&](const HostProcess& process) { return process.says(start, std::chrono::seconds(30)); };
  return std::ranges::all_of(processes_, says);
}

const std::vector<HostOutcome>& RanksOnHosts::wait() {
  for (std::size_t rank = outcomes_.size(); rank < processes_.size(); ++rank) {
    outcomes_.push_back(processes_[rank].wait());
  }
  return outcomes_;
}

std::string RanksOnHosts::text() const {
  std::string text;
  for (std::size_t rank = 0; rank < outcomes_.size(); ++rank) {
    for (const HostLine& line : outcomes_[rank].lines) text += fmt::format("[{}] {}\n", rank, line.text);
    text += fmt::format("[{}] ended with {}\n", rank, outcomes_[rank].exit_code);
  }
  return text;
}

}  // namespace tessera::testing
