#include "tessera/mesh/store.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <doctest/doctest.h>  // after torch, which has a CHECK of its own

#include "tessera/mesh/job_folder.h"
#include "tessera/tests/harness/refused.h"

using namespace tessera;
using tessera::testing::check_refused;
namespace fs = std::filesystem;

namespace {

// Makes a folder, names it in TMPDIR while it lives, and then removes it.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (fs::temp_directory_path() / "tessera-store-test-XXXXXX").string();
    path_ = mkdtemp(name.data());
    setenv("TMPDIR", path_.c_str(), 1);
  }
  ~TemporaryFolder() {
    unsetenv("TMPDIR");
    fs::remove_all(path_);
  }
  std::string path() const { return path_; }

 private:
  std::string path_;
};

Environment environment_of(int64_t rank, int64_t size) {
  Environment environment;
  environment.launcher = "torchrun";
  environment.rank = rank;
  environment.size = size;
  environment.local_size = size;
  environment.timeout_seconds = 2;
  return environment;
}

int64_t free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  REQUIRE(bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0);
  REQUIRE(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0);
  close(fd);
  return ntohs(address.sin_port);
}

// Returns the addresses, in the kernel's hexadecimal form, at which a process of this host listens on `port`.
std::set<std::string> listening_on(int64_t port) {
  std::set<std::string> addresses;
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(table);
    std::string line;
    while (std::getline(file, line)) {
      // A line is "  0: 0100007F:73AB 00000000:0000 0A ...": local address, remote address, state (0A listens).
      const std::string end = fmt::format(":{:04X} ", port);
      const std::size_t at = line.find(end);
      if (at == std::string::npos || line.find(" 0A ") == std::string::npos || at > line.find(" 0A ")) continue;
      addresses.insert(line.substr(line.find(": ") + 2, at - line.find(": ") - 2));
    }
  }
  return addresses;
}

}  // namespace

TEST_CASE("TESSERA_STORE: ranks meet in a file, apart for each restart") {
  const TemporaryFolder folder;
  Environment environment = environment_of(0, 2);
  environment.store_path = folder.path() + "/store";
  const auto first = make_store(environment);
  const auto second = make_store(environment);
  first->set("key", "value");
  CHECK(second->get_to_str("key") == "value");
  environment.restart_count = 1;
  CHECK_FALSE(make_store(environment)->check({"key"}));
}

TEST_CASE("on one host the store's server listens on the loopback address alone") {
  for (const std::string address : {"127.0.0.1", "localhost", "some-name-of-this-host"}) {
    CAPTURE(address);
    Environment environment = environment_of(0, 2);
    environment.master_address = address;
    environment.master_port = free_port();
    const auto server = make_store(environment);
    CHECK(listening_on(environment.master_port) == std::set<std::string>{"0100007F"});
    environment.rank = 1;
    const auto client = make_store(environment);
    server->set("key", "value");
    CHECK(client->get_to_str("key") == "value");
  }
}

TEST_CASE("where torchrun's agent serves the store, rank 0 is a client too") {
  Environment environment = environment_of(0, 2);
  environment.master_address = "127.0.0.1";
  environment.master_port = free_port();
  const auto agents = make_store(environment);
  environment.agent_store = true;
  const auto client = make_store(environment);
  agents->set("key", "value");
  CHECK(client->get_to_str("key") == "value");
}

TEST_CASE("a launcher that names the job: ranks of one host meet in a private folder that goes with the last") {
  const TemporaryFolder folder;
  Environment environment = environment_of(0, 2);
  environment.job_id = "PMIX_NAMESPACE=42";
  {
    const auto first = make_store(environment);
    environment.rank = 1;
    const auto second = make_store(environment);
    first->set("key", "value");
    CHECK(second->get_to_str("key") == "value");
    const fs::path user = fs::path(folder.path()) / fmt::format("tessera-{}", geteuid());
    struct stat status {};
    REQUIRE(stat(user.c_str(), &status) == 0);
    CHECK((status.st_mode & 0777) == 0700);
    environment.job_id = "PMIX_NAMESPACE=43";
    CHECK_FALSE(make_store(environment)->check({"key"}));
  }
  CHECK(fs::is_empty(fs::path(folder.path()) / fmt::format("tessera-{}", geteuid())));
}

TEST_CASE("what an earlier job of the same name left behind is emptied by the first to come, not by the second") {
  const TemporaryFolder folder;
  std::string left;
  {
    const JobFolder job("job 7");
    left = job.path() + "/left";
    std::ofstream(left) << "x";
  }
  fs::create_directories(fs::path(left).parent_path());
  fs::permissions(fs::path(left).parent_path(), fs::perms::owner_all);
  std::ofstream(left) << "x";
  const JobFolder first("job 7");
  CHECK_FALSE(fs::exists(left));
  std::ofstream(left) << "y";
  const JobFolder second("job 7");
  CHECK(fs::exists(left));
  CHECK(first.path() == second.path());
  CHECK(JobFolder("job 8").path() != first.path());
}

TEST_CASE("a folder that others may enter is refused") {
  const TemporaryFolder folder;
  const std::string user = fmt::format("{}/tessera-{}", folder.path(), geteuid());
  fs::create_directory(user);
  fs::permissions(user, fs::perms::owner_all | fs::perms::others_exec);
  check_refused<std::runtime_error>([] { const JobFolder job("job"); }, "is not a folder of mode 0700 of this user");
  fs::remove_all(user);
  fs::create_symlink("/tmp", user);
  check_refused<std::runtime_error>([] { const JobFolder job("job"); },
                                    "set TESSERA_STORE to a file that only you can write");
}

TEST_CASE("a folder that cannot be made is refused, with what to set") {
  const TemporaryFolder folder;
  fs::remove(folder.path());
  check_refused<std::runtime_error>(
      [] { const JobFolder job("job"); },
      fmt::format(
          "cannot make folder {}/tessera-{} for the ranks to meet in: No such file or directory; set TESSERA_STORE",
          folder.path(), geteuid()));
}

TEST_CASE("without a way to meet, the error names the variables to set") {
  Environment environment = environment_of(1, 4);
  environment.local_size = 2;
  environment.job_id = "SLURM_JOB_ID=7";
  check_refused<std::invalid_argument>(
      [&] { make_store(environment); },
      "rank 1 of 4 (from torchrun): nothing says where the ranks meet; set MASTER_ADDR and MASTER_PORT");
  environment.master_address = "node0";
  check_refused<std::invalid_argument>([&] { make_store(environment); }, "MASTER_ADDR=node0 without MASTER_PORT");
  environment.store_path = "/no/such/folder/store";
  check_refused<std::invalid_argument>([&] { make_store(environment); }, "/no/such/folder is not a folder");
}

TEST_CASE("a server that is not there, or a port that is taken, is an error with the address") {
  Environment environment = environment_of(1, 2);
  environment.master_address = "127.0.0.1";
  environment.master_port = free_port();
  environment.timeout_seconds = 1;
  check_refused<std::runtime_error>(
      [&] { make_store(environment); },
      fmt::format("rank 1: the store at 127.0.0.1:{} cannot be reached", environment.master_port));
  environment.rank = 0;
  const auto server = make_store(environment);
  check_refused<std::runtime_error>([&] { make_store(environment); },
                                    "Address already in use; choose another MASTER_PORT");
}
