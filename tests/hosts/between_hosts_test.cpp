// Checks what docs/reliability.md promises where the network between hosts fails.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/tests/harness/skip.h"
#include "tessera/tests/harness/text.h"
#include "tessera/tests/hosts/ranks_on_hosts.h"

using namespace tessera::testing;

namespace {

constexpr int64_t kLimit = 5;  // TESSERA_TIMEOUT
const std::string kReduces = "tests/hosts/host_job ";

double seconds_between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}

// Says what the ranks in `ranks` must report, all in one line, when something happens to a job of several hosts.
struct Want {
  std::vector<int64_t> ranks;
  std::vector<std::string> parts;
};

// Runs `what` while the ranks reduce, and checks the errors of those that survive and their times.
void check_survivors(Hosts& hosts, const std::function<void()>& what, const std::vector<Want>& wants) {
  RanksOnHosts job(hosts, kReduces + "60", {{"TESSERA_TIMEOUT", std::to_string(kLimit)}});
  REQUIRE(job.all_say("begun"));
  const auto fault = Clock::now();
  what();
  job.wait();
  const std::string all = job.text();
  INFO(all);
  for (const Want& want : wants) {
    for (const int64_t rank : want.ranks) {
      const HostOutcome& outcome = job.wait()[static_cast<std::size_t>(rank)];
      const std::vector<HostLine> errors = outcome.starting_with("error: ");
      CAPTURE(rank);
      REQUIRE(errors.size() == 1);
      fmt::print("rank {}: error after {:.2f} s, end after {:.2f} s\n", rank, seconds_between(fault, errors[0].time),
                 seconds_between(fault, outcome.ended));
      CHECK(seconds_between(fault, errors[0].time) < kLimit + 2);
      CHECK(seconds_between(fault, outcome.ended) < kLimit + 3);
      for (const std::string& part : want.parts) {
        CAPTURE(part);
        CHECK(contains(errors[0].text, part));
      }
    }
  }
}

}  // namespace

#define TESSERA_SKIP_WITHOUT_HOSTS() \
  if (!Hosts::why_not().empty()) TESSERA_SKIP_MISSING(Hosts::why_not())

TEST_CASE("the cable of a host is cut during collectives: both sides end, and name the other side") {
  TESSERA_SKIP_WITHOUT_HOSTS();
  Hosts hosts(2);
  check_survivors(hosts, [&] { hosts.cut(1); },
                  {{{0, 1}, {"ranks [2, 3] do not answer"}},
                   {{2, 3}, {"rank 0, which serves the store, does not answer"}}});
}

TEST_CASE("a host of three disappears: the others end, and name its ranks") {
  TESSERA_SKIP_WITHOUT_HOSTS();
  Hosts hosts(3);
  check_survivors(hosts, [&] { hosts.remove(2); }, {{{0, 1, 2, 3}, {"ranks [4, 5] do not answer"}}});
}

TEST_CASE("the host that serves the store disappears: the others end, and name rank 0") {
  TESSERA_SKIP_WITHOUT_HOSTS();
  Hosts hosts(2);
  check_survivors(hosts, [&] { hosts.remove(0); }, {{{2, 3}, {"rank 0, which serves the store, does not answer"}}});
}

TEST_CASE("a firewall begins to drop what goes to a host: both sides end, and name the other side") {
  TESSERA_SKIP_WITHOUT_HOSTS();
  Hosts hosts(2);
  check_survivors(hosts, [&] { hosts.drop(1); },
                  {{{0, 1}, {"ranks [2, 3] do not answer"}},
                   {{2, 3}, {"rank 0, which serves the store, does not answer"}}});
}
