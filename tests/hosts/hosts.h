#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/tests/hosts/delayed_link.h"
#include "tessera/tests/hosts/host_process.h"
#include "tessera/tools/launcher/private_folder.h"

namespace tessera::testing {

// Makes hosts on this machine for tests of what crosses a network. Each host has a network of its own (a namespace with
// `lo` and `eth0`), processes, shared memory, a name, a boot id and a TMPDIR of its own; the rest of the file system is
// shared, as by NFS. The hosts' `eth0` are joined by a bridge, in a namespace of its own too, so that the machine's own
// network stays as it is:
//
//   Hosts hosts(2);
//   hosts.run(0, "ping -c 1 host1");
//
// Invariants:
//   - host h is called host<h> and has the address 10.77.0.<h + 1>; /etc/hosts on each host names all of them;
//   - no process that was started on a host outlives the object, however it ends, nor does a killed test program's;
//   - the names of the namespaces begin with one that only this object has, on which its process holds a lock.
//
// Needs root, and `ip`, `nsenter` and `nft`. Not for use by several threads.
class Hosts {
 public:
  struct Options {
    std::chrono::milliseconds delay{0};  // of each frame, on its way into and out of each host
    bool name_is_loopback = false;       // a host's own name is that of 127.0.1.1, as Debian's installer makes it
  };

  // Returns why this machine can make no hosts, or "".
  static std::string why_not();

  // Throws std::runtime_error with the text of the program that failed.
  explicit Hosts(int64_t count) : Hosts(count, Options{}) {}
  Hosts(int64_t count, Options options);
  ~Hosts();
  Hosts(const Hosts&) = delete;
  Hosts& operator=(const Hosts&) = delete;

  int64_t count() const { return static_cast<int64_t>(inits_.size()); }
  static std::string name(int64_t host);
  static std::string address(int64_t host);
  // Is that of the bridge, from which a user's machine starts jobs.
  static std::string outside_address() { return "10.77.0.254"; }
  // Is a folder that all hosts see; it is removed at the end.
  const std::string& folder() const { return folder_.path(); }
  // Is a program that runs a shell's command on a host, as ssh does: its first argument is the host's name or address.
  std::string agent() const { return folder() + "/enter"; }

  // Starts a shell's command on a host, in the test's working folder.
  HostProcess start(int64_t host, const std::string& command) const;
  // Starts it beside the bridge, with the test's own processes and files.
  HostProcess start_outside(const std::string& command) const;
  HostOutcome run(int64_t host, const std::string& command) const { return start(host, command).wait(); }

  // Limits what enters and leaves a host, in tc's words: "1gbit".
  void rate(int64_t host, const std::string& rate) const;
  // Loses so many of a thousand frames on the way to a host, at random.
  void loss(int64_t host, int64_t per_mille) const;
  // Drops, without a word, all frames to and from a host, as a firewall between the hosts does.
  void drop(int64_t host) const;
  // Drops those between two hosts alone.
  void drop_between(int64_t one, int64_t other) const;
  // Takes the cable out of a host.
  void cut(int64_t host) const;
  // Ends a host as a power failure does: nothing that its processes send when they end leaves it.
  void remove(int64_t host);

 private:
  std::string netns(int64_t host) const { return id_ + "-" + name(host); }
  std::string bridge() const { return id_ + "-bridge"; }
  static std::string port(int64_t host) { return "port" + std::to_string(host); }
  void write_files(int64_t count);
  void make_network(int64_t count);
  void join(int64_t host);
  void start_init(int64_t host);
  void wait_until_ready(int64_t host) const;
  void on_the_bridge(const std::string& rule) const;
  void clean_up() noexcept;

  const Options options_;
  const PrivateFolder folder_;
  std::string id_;
  int lock_ = -1;
  std::vector<std::unique_ptr<DelayedLink>> links_;
  std::vector<pid_t> inits_;  // the first process of each host, 0 for one that was removed
};

}  // namespace tessera::testing
