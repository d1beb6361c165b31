// Checks what a stranger can do who reaches the store's port from another host (docs/security.md).
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/tests/harness/skip.h"
#include "tessera/tests/harness/text.h"
#include "tessera/tests/hosts/ranks_on_hosts.h"

using namespace tessera::testing;

namespace {

const std::string kForged = "the stranger's text";

// Writes a failure of rank 1, as a rank would, into the store of a job that reduces; returns how the job has ended.
std::string with_a_stranger(const std::map<std::string, std::string>& variables) {
  const Hosts hosts(2);
  RanksOnHosts job(hosts, "tests/hosts/host_job 15", variables);
  REQUIRE(job.all_say("begun"));
  const HostOutcome stranger = hosts.run(
      1, fmt::format("timeout 60 {} -c 'from torch.distributed import TCPStore; s = TCPStore(\"host0\", 29400, "
                     "is_master=False); s.set(\"restart0/tessera/failure\", \"0 1 1 x{}\")'",
                     std::getenv("PYTHON"), "the stranger'\\''s text"));
  const std::string said = stranger.text();
  CAPTURE(said);
  CHECK(stranger.exit_code == 0);
  job.wait();
  return job.text();
}

}  // namespace

#define TESSERA_SKIP_WITHOUT_HOSTS() \
  if (!Hosts::why_not().empty()) TESSERA_SKIP_MISSING(Hosts::why_not())

TEST_CASE("a stranger's record of a failure ends a job without a secret, and not one with a secret") {
  TESSERA_SKIP_WITHOUT_HOSTS();
  const std::string open = with_a_stranger({});
  CAPTURE(open);
  CHECK(contains(open, "rank 1 failed in x: " + kForged));
  CHECK_FALSE(contains(open, "done"));
  const std::string closed = with_a_stranger({{"TESSERA_SECRET", "only the ranks know this"}});
  CAPTURE(closed);
  CHECK_FALSE(contains(closed, kForged));
  CHECK_FALSE(contains(closed, "error: "));
  for (int64_t rank = 0; rank < 4; ++rank) CHECK(contains(closed, fmt::format("[{}] done: ", rank)));
}

TEST_CASE("ranks on another host that do not know the secret are refused, and so end the job") {
  TESSERA_SKIP_WITHOUT_HOSTS();
  const Hosts hosts(2);
  const std::string own = "env TESSERA_TIMEOUT=10 TESSERA_SECRET=secret$(($RANK / 2)) tests/hosts/host_job 1";
  RanksOnHosts job(hosts, "bash -c " + quoted(own));
  job.wait();
  const std::string text = job.text();
  CAPTURE(text);
  for (const HostOutcome& outcome : job.wait()) {
    CHECK(outcome.exit_code == 1);
    CHECK(outcome.starting_with("error: ").size() == 1);
  }
  CHECK(contains(text, "does not carry this job's secret: somebody else has written it, or a rank has another secret"));
}
