// Where the processes of a job on one host listen.

#include <signal.h>
#include <unistd.h>

#include <cctype>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/tests/harness/skip.h"
#include "tessera/tests/harness/text.h"
#include "tessera/tests/tools/launching.h"
#include "tessera/tools/launcher/mpi_job.h"
#include "tessera/tools/launcher/private_folder.h"

namespace fs = std::filesystem;

using tessera::PrivateFolder;
using tessera::testing::contains;
using tessera::testing::content_of;
using tessera::testing::start_launch;
using tessera::testing::wait_or_kill;
using tessera::testing::wait_until;

namespace {

// Returns the process and all that it has started, directly or not, with their names.
std::map<pid_t, std::string> family_of(pid_t root) {
  std::map<pid_t, std::string> names;
  std::map<pid_t, pid_t> parents;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    if (std::isdigit(static_cast<unsigned char>(entry.path().filename().string()[0])) == 0) continue;
    const std::string line = content_of(entry.path().string() + "/stat");
    const std::size_t begin = line.find('('), end = line.rfind(')');
    if (end == std::string::npos) continue;
    const auto pid = static_cast<pid_t>(std::stol(line));
    names[pid] = line.substr(begin + 1, end - begin - 1);
    std::istringstream fields(line.substr(end + 1));
    char state = '?';
    fields >> state >> parents[pid];
  }
  std::map<pid_t, std::string> family;
  for (const auto& [pid, name] : names) {
    pid_t ancestor = pid;
    while (ancestor > 1 && ancestor != root) ancestor = parents[ancestor];
    if (ancestor == root) family[pid] = name;
  }
  return family;
}

// Returns the links of the process's open files, such as "socket:[1234]".
std::set<std::string> files_of(pid_t pid) {
  std::set<std::string> files;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator("/proc/" + std::to_string(pid) + "/fd", ignored)) {
    files.insert(fs::read_symlink(entry.path(), ignored).string());
  }
  return files;
}

struct Socket {
  std::string address;  // with the port, in the kernel's hexadecimal form
  bool listens = false;
};

// Returns the TCP and UDP sockets of the process.
std::vector<Socket> sockets_of(pid_t pid) {
  const std::set<std::string> files = files_of(pid);
  std::vector<Socket> found;
  for (const std::string table : {"/proc/net/tcp", "/proc/net/tcp6", "/proc/net/udp", "/proc/net/udp6"}) {
    std::ifstream lines(table);
    for (std::string line; std::getline(lines, line);) {
      std::istringstream fields(line);
      std::string number, local, remote, state, skipped, inode;
      fields >> number >> local >> remote >> state;
      for (int i = 0; i < 5; ++i) fields >> skipped;
      fields >> inode;
      const bool listens = state == "0A" || contains(table, "udp");
      if (files.contains("socket:[" + inode + "]")) found.push_back({local, listens});
    }
  }
  return found;
}

bool is_loopback(const std::string& address) {
  return address.starts_with("0100007F:") || address.starts_with("00000000000000000000000001000000:");
}

// Checks that every socket of a job of two ranks, which have communicated, is on the loopback interface. Returns how
// many there are and the names of the processes.
std::pair<int, std::set<std::string>> check_job(const std::string& backend) {
  const PrivateFolder folder;
  const pid_t pid =
      start_launch({"-n", "2", "--backend", backend, "tests/mesh/failing_job", "ends late"}, folder.path());
  CHECK(wait_until([&] {
    const std::string said = content_of(folder.path() + "/out");
    return contains(said, "[0] ready") && contains(said, "[1] ready");
  }));
  int sockets = 0;
  std::set<std::string> names;
  for (const auto& process : family_of(pid)) {
    const std::string& name = process.second;
    names.insert(name);
    for (const Socket& socket : sockets_of(process.first)) {
      CAPTURE(name);
      CAPTURE(socket.address);
      CAPTURE(socket.listens);
      ++sockets;
      CHECK(is_loopback(socket.address));
    }
  }
  ::kill(pid, SIGTERM);
  wait_or_kill(pid);
  return {sockets, names};
}

}  // namespace

TEST_CASE("launch --backend mpi: no process of a job has a socket beyond the loopback interface") {
  if (!tessera::has_mpirun()) TESSERA_SKIP_MISSING("no mpirun is in PATH");
  const auto [sockets, names] = check_job("mpi");
  CHECK(sockets >= 1);  // the ranks' way to mpirun
  CHECK((names.contains("mpirun") || names.contains("orterun")));
  CHECK(names.contains("failing_job"));
}

TEST_CASE("launch --backend gloo: no process of a job has a socket beyond the loopback interface") {
  const auto [sockets, names] = check_job("gloo");
  CHECK(sockets >= 2);  // Gloo's connection
  CHECK(names.contains("failing_job"));
}
