#include "tessera/tests/hosts/hosts.h"

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>

#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tessera/mesh/core/same_file.h"
#include "tessera/tests/harness/shell.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLocks = "/run/tessera-hosts";

void must(const std::string& command) {
  const ShellOutcome outcome = shell(command);
  if (outcome.exit_code == 0) return;
  throw std::runtime_error(fmt::format("{}: exit code {}: {}", command, outcome.exit_code, outcome.output));
}

// Returns a descriptor that holds the lock on `path`, or -1 where another process holds it or has removed the file.
int lock_file(const std::string& path) {
  const int fd = open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) throw std::runtime_error(path + " cannot be opened");
  if (flock(fd, LOCK_EX | LOCK_NB) == 0 && names_file(path, fd)) return fd;
  close(fd);
  return -1;
}

// A namespace goes with its devices. Only what is named `id`, or begins with it and a dash, is removed.
void remove_namespaces(const std::string& id) {
  shell(fmt::format("for ns in $(ip netns list | cut -d' ' -f1 | grep '^{}-'); do ip netns del $ns; done", id));
}

// Removes what tests that were killed have left.
void sweep() {
  for (const fs::directory_entry& entry : fs::directory_iterator(kLocks)) {
    const int fd = lock_file(entry.path());
    if (fd < 0) continue;
    remove_namespaces(entry.path().filename());
    fs::remove(entry.path());
    close(fd);
  }
}

// Runs as the first process of a host: it makes what a host has for itself, and then takes up the orphans.
constexpr const char* kInit = R"(set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mount --bind "$1/boot_id" /proc/sys/kernel/random/boot_id
mount --bind "$1/hosts" /etc/hosts
hostname "$2"
touch "$1/ready"
exec <&- >&- 2>&-
while :; do sleep 3600; done
)";

// Is the program that Hosts::agent names. mpirun gives the command as several words.
constexpr const char* kAgent = R"script(#!/bin/bash
cd {0}
case $1 in
  10.77.0.*) host=host$((${{1##*.}} - 1)) ;;
  *) host=$1 ;;
esac
shift
exec nsenter -t "$(cat "$host/pid")" --net --pid --uts --ipc --mount -- \
  env -u TEST_TMPDIR TMPDIR="{0}/$host/tmp" HOME="{0}/$host/tmp" bash -c 'cd "$0" && eval "$@"' "{1}" "$*"
)script";

// Runs in the new process of a new host. It allocates nothing, since another thread may have been allocating just then.
[[noreturn]] void become_init(const char* netns, const char* folder, const char* name) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const int fd = open(netns, O_RDONLY | O_CLOEXEC);
  if (fd < 0 || setns(fd, CLONE_NEWNET) != 0) _exit(1);
  execl("/bin/bash", "init", "-c", kInit, "init", folder, name, nullptr);
  _exit(1);
}

void write_file(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

}  // namespace

std::string Hosts::name(int64_t host) { return fmt::format("host{}", host); }
std::string Hosts::address(int64_t host) { return fmt::format("10.77.0.{}", host + 1); }

std::string Hosts::why_not() {
  if (geteuid() != 0) return "network namespaces need root";
  for (const char* program : {"ip", "tc", "nft", "nsenter"}) {
    if (shell(fmt::format("command -v {}", program)).exit_code == 0) continue;
    return fmt::format("there is no program {}; run tools/setup --full", program);
  }
  const std::string probe = fmt::format("tessera-probe-{}", getpid());
  const ShellOutcome outcome = shell(fmt::format("ip netns add {0} && ip netns del {0}", probe));
  return outcome.exit_code == 0 ? "" : "a network namespace cannot be made: " + outcome.output;
}

Hosts::Hosts(int64_t count, Options options) : options_(options), inits_(static_cast<std::size_t>(count), 0) {
  static int made = 0;
  fs::create_directories(kLocks);
  sweep();
  while (lock_ < 0) {  // the sweep of another test may have taken a file that is not locked yet
    id_ = fmt::format("tess{}-{}", getpid(), made++);
    lock_ = lock_file(fmt::format("{}/{}", kLocks, id_));
  }
  try {
    write_files(count);
    make_network(count);
    for (int64_t host = 0; host < count; ++host) start_init(host);
    for (int64_t host = 0; host < count; ++host) wait_until_ready(host);
  } catch (...) {
    clean_up();
    throw;
  }
}

Hosts::~Hosts() { clean_up(); }

void Hosts::clean_up() noexcept {
  for (pid_t& init : inits_) {
    if (init == 0) continue;
    kill(init, SIGKILL);
    waitpid(init, nullptr, 0);
    init = 0;
  }
  links_.clear();
  remove_namespaces(id_);
  std::error_code ignored;
  fs::remove(fmt::format("{}/{}", kLocks, id_), ignored);
  if (lock_ >= 0) close(lock_);
}

void Hosts::write_files(int64_t count) {
  std::string all;
  for (int64_t host = 0; host < count; ++host) all += fmt::format("{} {}\n", address(host), name(host));
  for (int64_t host = 0; host < count; ++host) {
    const std::string folder = folder_.path() + "/" + name(host);
    fs::create_directories(folder + "/tmp");
    fs::permissions(folder + "/tmp", fs::perms::owner_all);
    const std::string own = options_.name_is_loopback ? fmt::format("127.0.1.1 {}\n", name(host)) : "";
    write_file(folder + "/hosts", "127.0.0.1 localhost\n" + own + all);
    write_file(folder + "/boot_id", fmt::format("00000000-0000-4000-8000-{:06}{:06}\n", getpid() % 1000000, host));
  }
  write_file(agent(), fmt::format(fmt::runtime(kAgent), folder_.path(), fs::current_path().string()));
  fs::permissions(agent(), fs::perms::owner_all);
}

void Hosts::make_network(int64_t count) {
  must("ip netns add " + bridge());
  must(
      fmt::format("ip -n {0} link set lo up && ip -n {0} link add bridge type bridge && ip -n {0} link set bridge up "
                  "&& ip -n {0} address add {1}/24 dev bridge",
                  bridge(), outside_address()));
  for (int64_t host = 0; host < count; ++host) join(host);
  must(
      fmt::format("ip netns exec {} nft 'add table bridge between; add chain bridge between frames {{ type filter hook "
                  "forward priority 0; }}'",
                  bridge()));
}

void Hosts::join(int64_t host) {
  must("ip netns add " + netns(host));
  if (options_.delay.count() == 0) {
    must(fmt::format("ip -n {} link add {} type veth peer name eth0 netns {}", bridge(), port(host), netns(host)));
  } else {
    links_.push_back(std::make_unique<DelayedLink>(bridge(), port(host), "eth0", options_.delay));
    must(fmt::format("ip -n {} link set eth0 netns {}", bridge(), netns(host)));
  }
  must(fmt::format("ip -n {0} link set {1} master bridge && ip -n {0} link set {1} up", bridge(), port(host)));
  must(fmt::format("ip -n {0} link set lo up && ip -n {0} link set eth0 up && ip -n {0} address add {1}/24 dev eth0",
                   netns(host), address(host)));
}

void Hosts::start_init(int64_t host) {
  const std::string space = "/run/netns/" + netns(host), folder = folder_.path() + "/" + name(host);
  const std::string its_name = name(host);
  const long child = syscall(SYS_clone, CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | SIGCHLD, nullptr,
                             nullptr, nullptr, nullptr);
  if (child < 0) throw std::runtime_error("a process with namespaces of its own cannot be made");
  if (child == 0) become_init(space.c_str(), folder.c_str(), its_name.c_str());
  inits_[static_cast<std::size_t>(host)] = static_cast<pid_t>(child);
  write_file(folder + "/pid", fmt::format("{}\n", child));
}

void Hosts::wait_until_ready(int64_t host) const {
  const std::string ready = folder_.path() + "/" + name(host) + "/ready";
  for (int i = 0; i < 500 && !fs::exists(ready); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  if (!fs::exists(ready)) throw std::runtime_error(name(host) + " has not started");
}

HostProcess Hosts::start(int64_t host, const std::string& command) const {
  return HostProcess(fmt::format("exec {} {} {}", agent(), name(host), quoted(command)));
}

HostProcess Hosts::start_outside(const std::string& command) const {
  return HostProcess(fmt::format("exec nsenter --net=/run/netns/{} -- bash -c {}", bridge(), quoted(command)));
}

void Hosts::rate(int64_t host, const std::string& rate) const {
  const std::string limit = fmt::format("root tbf rate {} burst 64kb latency 100ms", rate);
  must(fmt::format("tc -n {} qdisc add dev {} {}", bridge(), port(host), limit));
  must(fmt::format("tc -n {} qdisc add dev eth0 {}", netns(host), limit));
}

void Hosts::loss(int64_t host, int64_t per_mille) const {
  // Else a frame would be up to 64 KiB of data, and few of them would ever be lost.
  for (int64_t sender = 0; sender < count(); ++sender) {
    must(fmt::format("ip -n {} link set eth0 gso_max_segs 1", netns(sender)));
  }
  on_the_bridge(fmt::format("oifname {} numgen random mod 1000 <= {} counter drop", port(host), per_mille - 1));
}

void Hosts::drop(int64_t host) const {
  on_the_bridge(fmt::format("iifname {} drop", port(host)));
  on_the_bridge(fmt::format("oifname {} drop", port(host)));
}

void Hosts::drop_between(int64_t one, int64_t other) const {
  on_the_bridge(fmt::format("iifname {} oifname {} drop", port(one), port(other)));
  on_the_bridge(fmt::format("iifname {} oifname {} drop", port(other), port(one)));
}

void Hosts::on_the_bridge(const std::string& rule) const {
  must(fmt::format("ip netns exec {} nft add rule bridge between frames {}", bridge(), quoted(rule)));
}

void Hosts::cut(int64_t host) const { must(fmt::format("ip -n {} link set {} down", bridge(), port(host))); }

void Hosts::remove(int64_t host) {
  cut(host);
  pid_t& init = inits_[static_cast<std::size_t>(host)];
  kill(init, SIGKILL);
  waitpid(init, nullptr, 0);
  init = 0;
  must(fmt::format("ip -n {} link delete {}", bridge(), port(host)));
}

}  // namespace tessera::testing
