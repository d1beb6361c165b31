// Checks that measured costs find by themselves which mesh dimension crosses the network, and what plans gain by them.
#include <sstream>
#include <string>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/tests/harness/skip.h"
#include "tessera/tests/hosts/ranks_on_hosts.h"

using namespace tessera::testing;

namespace {

// Returns the numbers of the one line that begins with `start`.
std::pair<double, double> numbers_after(const HostOutcome& outcome, const std::string& start) {
  const std::vector<HostLine> lines = outcome.starting_with(start);
  REQUIRE(lines.size() == 1);
  std::istringstream in(lines[0].text.substr(start.size()));
  double first = 0, second = 0;
  std::string of;
  in >> first;
  if (!(in >> second)) {
    in.clear();
    in >> of >> second;
  }
  return {first, second};
}

}  // namespace

TEST_CASE("with 1 Gbit/s between hosts, measured costs find the slow mesh dimension, and plans avoid it") {
  if (!Hosts::why_not().empty()) TESSERA_SKIP_MISSING(Hosts::why_not());
  const Hosts hosts(2);
  for (const int64_t host : {0, 1}) hosts.rate(host, "1gbit");
  RanksOnHosts job(hosts, "tests/hosts/topology_job", {}, 120);
  const HostOutcome first = job.wait()[0];
  const std::string text = job.text();
  CAPTURE(text);
  for (const HostOutcome& outcome : job.wait()) CHECK(outcome.exit_code == 0);
  fmt::print("{}", first.text());

  // 1 Gbit/s is 125 bytes in a microsecond, which the two ranks of a host share.
  const auto [host, tp] = numbers_after(first, "bandwidths: ");
  CHECK(host < 130);
  CHECK(host * 2 < tp);
  const auto [differ, all] = numbers_after(first, "differ: ");
  CHECK(differ >= 20);
  const auto [timed, slower] = numbers_after(first, "timed, slower: ");
  CHECK(timed >= 20);
  CHECK(slower <= timed / 4);
  // In the mean the plans for measured costs are about 1.5 times as fast; other load takes some of that.
  const auto [mean, median] = numbers_after(first, "mean, median: ");
  CHECK(mean > 1.2);
  CHECK(median > 1.1);
  const auto [uniform, measured] = numbers_after(first, "sums: ");
  CHECK(measured < uniform);
}
