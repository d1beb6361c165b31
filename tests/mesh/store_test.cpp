#include "tessera/mesh/store.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <doctest/doctest.h>  // after torch, which has a CHECK of its own

#include "tessera/mesh/job_folder.h"
#include "tessera/mesh/timed_store.h"
#include "tessera/tests/harness/refused.h"
#include "tessera/tests/mesh/free_port.h"
#include "tessera/tests/mesh/temporary_folder.h"

using namespace tessera;
using tessera::testing::check_refused;
using tessera::testing::free_port;
using tessera::testing::TemporaryFolder;
namespace fs = std::filesystem;

namespace {

constexpr auto kPatience = std::chrono::seconds(2);

Environment environment_of(int64_t rank, int64_t size) {
  Environment environment;
  environment.launcher = "torchrun";
  environment.rank = rank;
  environment.size = size;
  environment.local_size = size;
  environment.timeout_seconds = 2;
  return environment;
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

// Returns the environment of rank 0 of two hosts with a rank each, which meet at a port of this host.
Environment environment_of_host() {
  Environment environment = environment_of(0, 2);
  environment.local_size = 1;
  environment.master_address = "127.0.0.1";
  environment.master_port = free_port();
  return environment;
}

}  // namespace

TEST_CASE("TESSERA_STORE: ranks meet in a folder that they make, apart for each restart and each job") {
  const TemporaryFolder folder;
  Environment environment = environment_of(0, 2);
  environment.store_path = folder.path() + "/store";
  const auto first = make_store(environment);
  const auto second = make_store(environment);
  first->set("key", "value");
  CHECK(second->get_to_str("key") == "value");
  environment.restart_count = 1;
  CHECK_FALSE(make_store(environment)->check({"key"}));
  environment.restart_count = 0;
  environment.job_key = "TESSERA_JOB=another";
  CHECK_FALSE(make_store(environment)->check({"key"}));
  struct stat status {};
  REQUIRE(stat(environment.store_path.c_str(), &status) == 0);
  CHECK((status.st_mode & 0777) == 0700);
}

TEST_CASE("on one host ranks meet without a port: MASTER_PORT only names the job") {
  const TemporaryFolder folder;
  Environment environment = environment_of(0, 2);
  environment.master_address = "some-name-of-this-host";
  environment.master_port = free_port();
  const auto first = make_store(environment);
  CHECK(listening_on(environment.master_port).empty());
  environment.rank = 1;
  const auto second = make_store(environment);
  first->set("key", "value");
  CHECK(second->get_to_str("key") == "value");
  environment.master_port = environment.master_port == 1 ? 2 : environment.master_port - 1;
  CHECK_FALSE(make_store(environment)->check({"key"}));
}

TEST_CASE("a store's server at a loopback address listens there alone") {
  for (const std::string address : {"127.0.0.1", "localhost"}) {
    CAPTURE(address);
    Environment environment = environment_of(0, 2);
    environment.local_size = 1;
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

TEST_CASE("with a secret, a value that somebody else wrote is refused, and all calls work among those who have it") {
  const TemporaryFolder folder;
  Environment environment = environment_of_host();
  const std::string file = folder.path() + "/secret";
  std::ofstream(file) << "a long secret\n";
  fs::permissions(file, fs::perms::owner_read | fs::perms::owner_write);
  environment.secret_file = file;
  const auto server = make_store(environment);
  environment.rank = 1;
  environment.secret_file.clear();
  environment.secret = "a long secret";
  const auto client = make_store(environment);
  environment.secret = "another";
  const auto stranger = make_store(environment);
  environment.secret.clear();
  const auto plain = make_store(environment);
  server->set("key", "value");
  CHECK(client->get_to_str("key") == "value");
  CHECK(client->compareSet("word", "", "one") == "one");
  CHECK(server->compareSet("word", "", "two") == "one");
  CHECK(server->compareSet("word", "one", "two") == "two");
  CHECK(server->add("count", 5) == 5);
  CHECK(client->add("count", -7) == -2);
  // Additions of several ranks at once are all counted.
  std::vector<std::jthread> adding;
  for (const auto& store : {server, client}) {
    adding.emplace_back([store] {
      for (int i = 0; i < 50; ++i) store->add("both", 1);
    });
  }
  adding.clear();
  CHECK(server->add("both", 0) == 100);
  CHECK(dynamic_cast<const c10d::TCPStore*>(&innermost_store(*client)) != nullptr);
  const std::string refused = "does not carry this job's secret";
  check_refused<std::runtime_error>([&] { stranger->get("key"); }, refused);
  plain->set("key", "forged");
  check_refused<std::runtime_error>([&] { client->get("key"); }, refused);
  CHECK(client->compareSet("key", "", "mended") == "mended");
  CHECK(server->get_to_str("key") == "mended");
  // A signed value is no value of another key.
  plain->set("moved", plain->get_to_str("word"));
  check_refused<std::runtime_error>([&] { client->get("moved"); }, refused);
  fs::permissions(file, fs::perms::others_read, fs::perm_options::add);
  environment.secret_file = file;
  check_refused<std::invalid_argument>([&] { make_store(environment); }, "others can read it (mode 604)");
}

TEST_CASE("where torchrun's agent serves the store, rank 0 is a client too") {
  Environment environment = environment_of_host();
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
    const JobFolder job(folder_of_job("job 7"), kPatience);
    left = job.path() + "/left@1";
    std::ofstream(left) << "x";
  }
  fs::create_directories(fs::path(left).parent_path());
  fs::permissions(fs::path(left).parent_path(), fs::perms::owner_all);
  std::ofstream(left) << "x";
  const JobFolder first(fs::path(left).parent_path(), kPatience);
  CHECK_FALSE(fs::exists(left));
  std::ofstream(left) << "y";
  const JobFolder second(folder_of_job("job 7"), kPatience);
  CHECK(fs::exists(left));
  CHECK(first.path() == second.path());
  CHECK(folder_of_job("job 8") != first.path());
}

TEST_CASE("the folders of jobs that were killed are removed by the next job of this user, and no others") {
  const TemporaryFolder folder;
  const JobFolder running(folder_of_job("running"), kPatience);
  std::ofstream(running.path() + "/key@1") << "x";
  const fs::path user = fs::path(running.path()).parent_path();
  const auto left = [&](const char* name, const char* file) {
    fs::create_directory(user / name);
    fs::permissions(user / name, fs::perms::owner_all);
    std::ofstream(user / name / file) << "x";
    return user / name;
  };
  const fs::path killed = left("0123456789abcdef", "key@1"), other = left("other", "somebody's");
  fs::create_directory_symlink(other, user / "link");
  folder_of_job("next");
  CHECK_FALSE(fs::exists(killed));
  CHECK(fs::exists(running.path() + "/key@1"));
  CHECK(fs::exists(other / "somebody's"));
  CHECK(fs::exists(user / "link"));
}

TEST_CASE("a secret's file must be a regular file of this user") {
  const TemporaryFolder folder;
  Environment environment = environment_of_host();
  environment.secret_file = folder.path() + "/secret";
  const auto refused = [&](const std::string& why) {
    check_refused<std::invalid_argument>([&] { make_store(environment); },
                                         "TESSERA_SECRET_FILE=" + environment.secret_file + ": " + why);
  };
  refused("it cannot be read: No such file or directory; name a file of this user");
  REQUIRE(mkfifo(environment.secret_file.c_str(), 0600) == 0);
  refused("it is no regular file");
  fs::remove(environment.secret_file);
  std::ofstream(environment.secret_file) << "\n";
  fs::permissions(environment.secret_file, fs::perms::owner_read);
  refused("it is empty");
  if (chown(environment.secret_file.c_str(), 12345, static_cast<gid_t>(-1)) == 0) refused("it is user 12345's");
}

TEST_CASE("a folder that others may enter is refused") {
  const TemporaryFolder folder;
  const std::string user = fmt::format("{}/tessera-{}", folder.path(), geteuid());
  fs::create_directory(user);
  fs::permissions(user, fs::perms::owner_all | fs::perms::others_exec);
  check_refused<std::runtime_error>([] { folder_of_job("job"); }, "is not a folder of mode 0700 of this user");
  fs::remove_all(user);
  fs::create_symlink("/tmp", user);
  check_refused<std::runtime_error>([] { folder_of_job("job"); },
                                    "set TESSERA_STORE to a path at which there is nothing");
}

TEST_CASE("a folder that cannot be made is refused, with what to set") {
  const TemporaryFolder folder;
  fs::remove(folder.path());
  check_refused<std::runtime_error>(
      [] { folder_of_job("job"); },
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
  environment.local_size = 1;
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
