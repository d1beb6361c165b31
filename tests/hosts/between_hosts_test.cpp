// Checks what docs/reliability.md promises where the network between hosts fails.
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
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

// Says what the errors of some ranks contain.
struct Want {
  std::vector<int64_t> ranks;
  std::vector<std::string> parts;
};

// Checks the errors of ranks and when they came: those of `job`, which has ended, after `fault`.
void check_errors(RanksOnHosts& job, Clock::time_point fault, const std::vector<Want>& wants) {
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
      CHECK(seconds_between(fault, outcome.ended) < kLimit + 4);
      for (const std::string& part : want.parts) {
        CAPTURE(part);
        CHECK(contains(errors[0].text, part));
      }
    }
  }
}

const std::map<std::string, std::string> kShort = {{"TESSERA_TIMEOUT", std::to_string(kLimit)}};

// Does `what` while ranks reduce.
void check_survivors(const Hosts& hosts, const std::function<void()>& what, const std::vector<Want>& wants) {
  RanksOnHosts job(hosts, kReduces + "60", kShort);
  REQUIRE(job.all_say("begun"));
  const auto fault = Clock::now();
  what();
  check_errors(job, fault, wants);
}

// Checks a job that cannot begin.
void check_start(const Hosts& hosts, std::map<std::string, std::string> variables, const std::vector<Want>& wants) {
  variables.insert(kShort.begin(), kShort.end());
  RanksOnHosts job(hosts, kReduces + "1", variables);
  REQUIRE(job.all_say("started"));
  check_errors(job, Clock::now(), wants);
}

// Checks a job that ends well.
void check_done(const Hosts& hosts, const std::map<std::string, std::string>& variables = {}) {
  RanksOnHosts job(hosts, kReduces + "5", variables);
  job.wait();
  const std::string all = job.text();
  INFO(all);
  for (const HostOutcome& outcome : job.wait()) CHECK(outcome.starting_with("done").size() == 1);
  if (!job.wait()[0].lines.empty()) fmt::print("{}\n", job.wait()[0].lines.back().text);
}

}  // namespace

#define TESSERA_SKIP_WITHOUT_HOSTS() \
  if (!Hosts::why_not().empty()) TESSERA_SKIP_MISSING(Hosts::why_not())

TEST_CASE("the cable of a host is cut during collectives: both sides end, and name the other side") {
  TESSERA_SKIP_WITHOUT_HOSTS();
  Hosts hosts(2);
  check_survivors(
      hosts, [&] { hosts.cut(1); },
      {{{0, 1}, {"ranks [2, 3] do not answer"}}, {{2, 3}, {"rank 0, which serves the store, does not answer"}}});
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
  check_survivors(
      hosts, [&] { hosts.drop(1); },
      {{{0, 1}, {"ranks [2, 3] do not answer"}}, {{2, 3}, {"rank 0, which serves the store, does not answer"}}});
}

TEST_CASE("one frame of a hundred is lost: the job goes on") {
  TESSERA_SKIP_WITHOUT_HOSTS();
  const Hosts hosts(2);
  for (const int64_t host : {0, 1}) hosts.loss(host, 10);
  check_done(hosts);
}

TEST_CASE("each frame takes a tenth of a second through each cable: the job goes on") {
  TESSERA_SKIP_WITHOUT_HOSTS();
  const Hosts hosts(2, {.delay = std::chrono::milliseconds(100)});
  check_done(hosts);
}

TEST_CASE("a host's own name is that of a loopback address, as on Debian: the ranks find each other all the same") {
  TESSERA_SKIP_WITHOUT_HOSTS();
  const Hosts hosts(3, {.name_is_loopback = true});
  check_done(hosts);
}

TEST_CASE("MASTER_ADDR is wrong: every rank ends within its limit, and says what it could not reach") {
  TESSERA_SKIP_WITHOUT_HOSTS();
  const Hosts hosts(2);
  // There is no such host, nobody listens there, and there is no such name.
  for (const std::string wrong : {"10.77.0.99", "10.77.0.2", "nowhere"}) {
    CAPTURE(wrong);
    const std::string store = fmt::format("the store at {}:29400 cannot be ", wrong);
    check_start(hosts, {{"MASTER_ADDR", wrong}}, {{{0}, {store + "served"}}, {{1, 2, 3}, {store + "reached"}}});
  }
}

TEST_CASE("a firewall drops what goes to a host from the start: both sides end within their limit") {
  TESSERA_SKIP_WITHOUT_HOSTS();
  const Hosts hosts(2);
  hosts.drop(1);
  check_start(hosts, {},
              {{{0, 1}, {"making a process group over ranks [0, 1, 2, 3]"}},
               {{2, 3}, {"the store at host0:29400 cannot be reached"}}});
}

TEST_CASE(
    "a firewall drops what two hosts send each other, which both reach the store: all ranks end within the limit") {
  TESSERA_SKIP_WITHOUT_HOSTS();
  const Hosts hosts(3);
  hosts.drop_between(1, 2);
  check_start(hosts, {}, {{{0, 1, 2, 3, 4, 5}, {"making a process group over ranks [0, 1, 2, 3, 4, 5]"}}});
}
