// Checks what a stranger can do who reaches the store's port from another host (docs/security.md).
#include <chrono>
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

// Waits for the job's store and for its ranks, and writes a failure of rank 1 as a rank would.
constexpr const char* kStranger = R"(
import time
from datetime import timedelta
from torch.distributed import TCPStore
print("ready", flush=True)
store = TCPStore("host0", 29400, is_master=False, timeout=timedelta(seconds=60))
store.get("restart0/world0/tessera/size")
time.sleep(2)
store.set("restart0/world0/tessera/failure", "0 1 1 xthe stranger's text")
)";

// Returns how a job has ended that reduces for twelve seconds, with a stranger on one of its hosts.
std::string with_a_stranger(const std::map<std::string, std::string>& variables) {
  const Hosts hosts(2);
  HostProcess stranger = hosts.start(1, fmt::format("timeout 120 {} -c {}", std::getenv("PYTHON"), quoted(kStranger)));
  REQUIRE(stranger.says("ready", std::chrono::seconds(60)));
  RanksOnHosts job(hosts, "tests/hosts/host_job 12", variables);
  job.wait();
  CHECK(stranger.wait().exit_code == 0);
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
