// Checks the hosts that the other tests of this folder use.
#include <chrono>
#include <string>

#include <doctest/doctest.h>

#include "tessera/tests/harness/shell.h"
#include "tessera/tests/harness/skip.h"
#include "tessera/tests/harness/text.h"
#include "tessera/tests/hosts/hosts.h"

using namespace tessera::testing;

namespace {

double seconds_of(const Hosts& hosts, int64_t host, const std::string& command, int code = 0) {
  const auto start = Clock::now();
  const HostOutcome outcome = hosts.run(host, command);
  CAPTURE(outcome.text());
  CHECK(outcome.exit_code == code);
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string said(const Hosts& hosts, int64_t host, const std::string& command) {
  return hosts.run(host, command).text();
}

// Connects to port 9 of a host, where nobody listens: code 1 means that the host refused, 124 that nothing came back.
std::string connect_to(int64_t host) { return "timeout 2 bash -c '</dev/tcp/" + Hosts::name(host) + "/9' 2>/dev/null"; }

}  // namespace

TEST_CASE("hosts have names, processes, shared memory, boot ids and folders of their own, and reach each other") {
  if (!Hosts::why_not().empty()) TESSERA_SKIP_MISSING(Hosts::why_not());
  const Hosts hosts(2);
  for (const std::string own :
       {"hostname", "cat /proc/sys/kernel/random/boot_id", "echo $TMPDIR", "readlink /proc/self/ns/net",
        "readlink /proc/self/ns/pid", "touch /dev/shm/$HOSTNAME; ls /dev/shm", "cat /sys/class/net/eth0/address"}) {
    CAPTURE(own);
    CHECK_FALSE(said(hosts, 0, own).empty());
    CHECK(said(hosts, 0, own) == said(hosts, 0, own));
    CHECK(said(hosts, 0, own) != said(hosts, 1, own));
  }
  CHECK(said(hosts, 1, "pwd -P") == shell("pwd -P").output);
  CHECK(said(hosts, 0, "hostname") == "host0\n");
  CHECK(hosts.run(0, connect_to(1)).exit_code == 1);
  CHECK(shell(hosts.agent() + " 10.77.0.2 echo 'two  spaces' '$HOSTNAME'").output == "two spaces host1\n");
}

TEST_CASE("a link can be cut and slowed, its frames dropped and lost") {
  if (!Hosts::why_not().empty()) TESSERA_SKIP_MISSING(Hosts::why_not());
  for (const std::string how : {"cut", "drop"}) {
    CAPTURE(how);
    const Hosts hosts(3);
    how == "cut" ? hosts.cut(1) : hosts.drop(1);
    CHECK(hosts.run(0, connect_to(1)).exit_code == 124);
    CHECK(hosts.run(1, connect_to(0)).exit_code == 124);
    CHECK(hosts.run(0, connect_to(2)).exit_code == 1);
  }
  const Hosts hosts(2);
  hosts.loss(1, 1000);
  CHECK(hosts.run(0, connect_to(1)).exit_code == 124);
}

TEST_CASE("a link has a rate and a delay") {
  if (!Hosts::why_not().empty()) TESSERA_SKIP_MISSING(Hosts::why_not());
  const std::string send =
      "import socket; s = socket.create_server((\"10.77.0.1\", 7)); print(\"ready\", flush=True); c = s.accept()[0]\n"
      "while c.recv(65536): pass";
  const std::string receive =
      "python3 -c 'import socket; c = socket.create_connection((\"10.77.0.1\", 7)); c.sendall(bytes(20000000)); "
      "c.shutdown(1); c.recv(1)'";
  const Hosts slow(2);
  slow.rate(1, "100mbit");
  HostProcess server = slow.start(0, "timeout 20 python3 -c '" + send + "'");
  REQUIRE(server.says("ready", std::chrono::seconds(10)));
  // 160 megabits at 100 Mbit/s.
  const double seconds = seconds_of(slow, 1, receive);
  CHECK(seconds > 1.5);
  CHECK(seconds < 6);
  CHECK(server.wait().exit_code == 0);

  const Hosts far(2, {.delay = std::chrono::milliseconds(100)});
  // The delay is that of one way through one host's cable: a question and its answer take four of them.
  seconds_of(far, 0, connect_to(1), 1);
  const double there_and_back = seconds_of(far, 0, connect_to(1), 1);
  CHECK(there_and_back > 0.4);
  CHECK(there_and_back < 1.0);
}

TEST_CASE("a host that is removed takes its processes along, and a new start sweeps what a killed test left") {
  if (!Hosts::why_not().empty()) TESSERA_SKIP_MISSING(Hosts::why_not());
  {
    Hosts hosts(2);
    HostProcess sleeping = hosts.start(1, "echo asleep; sleep 1000");
    REQUIRE(sleeping.says("asleep", std::chrono::seconds(10)));
    hosts.remove(1);
    CHECK(sleeping.wait().exit_code != 0);
    CHECK(hosts.run(0, connect_to(1)).exit_code == 124);
  }
  CHECK(shell("ip netns add tess0-killed-host0 && touch /run/tessera-hosts/tess0-killed").exit_code == 0);
  { const Hosts hosts(1); }
  CHECK_FALSE(contains(shell("ip netns list").output, "tess0-killed"));
  CHECK(shell("ls /run/tessera-hosts/tess0-killed 2>&1").exit_code != 0);
}
