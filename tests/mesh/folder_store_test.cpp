#include "tessera/mesh/folder_store.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <doctest/doctest.h>  // after torch, which has a CHECK of its own

#include "tessera/mesh/timed_store.h"
#include "tessera/tests/harness/refused.h"
#include "tessera/tests/mesh/temporary_folder.h"

using namespace tessera;
using tessera::testing::check_refused;
using tessera::testing::TemporaryFolder;
namespace fs = std::filesystem;

namespace {

constexpr auto kPatience = std::chrono::seconds(2);

using Store = c10::intrusive_ptr<FolderStore>;

Store folder_store(const TemporaryFolder& folder, std::chrono::milliseconds timeout = kPatience) {
  return c10::make_intrusive<FolderStore>(folder.path() + "/store", timeout,
                                          [](const std::string& key) { return key == "vital"; });
}

std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }
std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

TEST_CASE("a FolderStore has keys and values of any bytes, and c10d's rules for all calls") {
  const TemporaryFolder folder;
  const Store first = folder_store(folder), second = folder_store(folder);
  const std::string odd = "a/b @%\n" + std::string(1, '\0') + std::string(500, 'k');
  for (const std::string& key : {std::string("plain"), std::string(), odd, odd + "x"}) {
    first->set(key, bytes_of("of " + key));
    CHECK(text_of(second->get(key)) == "of " + key);
  }
  CHECK(first->getNumKeys() == 4);
  first->set("plain", bytes_of(""));
  CHECK(text_of(second->get("plain")).empty());
  CHECK(second->check({"plain", odd}));
  CHECK_FALSE(second->check({"plain", "missing"}));
  CHECK(first->deleteKey("plain"));
  CHECK_FALSE(second->deleteKey("plain"));
  CHECK_FALSE(second->check({"plain"}));
  CHECK(first->getNumKeys() == 3);
  CHECK(text_of(first->compareSet("word", bytes_of(""), bytes_of("one"))) == "one");
  CHECK(text_of(second->compareSet("word", bytes_of(""), bytes_of("two"))) == "one");
  CHECK(text_of(second->compareSet("word", bytes_of("one"), bytes_of("two"))) == "two");
  CHECK(text_of(second->compareSet("missing", bytes_of("one"), bytes_of("two"))) == "one");
  CHECK(first->add("count", 5) == 5);
  CHECK(second->add("count", -7) == -2);
}

TEST_CASE("a FolderStore loses no addition of several threads and stores, and compareSet has one winner") {
  const TemporaryFolder folder;
  std::vector<std::jthread> threads;
  std::atomic<int> winners{0};
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const Store store = folder_store(folder);
      for (int k = 0; k < 50; ++k) store->add("count", 1);
      const std::string mine = std::to_string(i);
      winners += text_of(store->compareSet("winner", {}, bytes_of(mine))) == mine ? 1 : 0;
    });
  }
  const Store store = folder_store(folder);
  threads.clear();
  CHECK(store->add("count", 0) == 200);
  CHECK(winners == 1);
}

TEST_CASE("a FolderStore that can reserve nothing takes the keys of failures alone, and says why") {
  const TemporaryFolder folder;
  const Store other = folder_store(folder);
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit few = {.rlim_cur = 128, .rlim_max = before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &few) == 0);
  std::vector<int> used;
  for (int fd; (fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;) used.push_back(fd);
  for (int kept = 0; kept < 3; ++kept) {  // for the folder and two of the three files that it reserves
    ::close(used.back());
    used.pop_back();
  }
  std::exception_ptr error;  // UBSan cannot look at it without a descriptor
  const Store poor = folder_store(folder);
  try {
    poor->set("key", bytes_of("value"));
  } catch (...) {
    error = std::current_exception();
  }
  poor->set("vital", bytes_of("rank 1 has no descriptor left"));
  for (const int fd : used) ::close(fd);
  ::setrlimit(RLIMIT_NOFILE, &before);
  REQUIRE(error);
  check_refused<std::runtime_error>(
      [&] { std::rethrow_exception(error); },
      "cannot make a file in the store's folder " + folder.path() + "/store: Too many open files");
  CHECK(text_of(other->get("vital")) == "rank 1 has no descriptor left");
  CHECK_FALSE(other->check({"key"}));
  poor->set("key", bytes_of("value"));  // it has what it needs now
  CHECK(text_of(other->get("key")) == "value");
}

TEST_CASE("a FolderStore's waits end with the keys that are missing") {
  const TemporaryFolder folder;
  const Store store = folder_store(folder, std::chrono::milliseconds(100));
  check_refused<std::runtime_error>([&] { store->get("nobody sets this"); },
                                    "timed out after 100 ms waiting in the store for nobody sets this");
}

TEST_CASE("a FolderStore whose file is cut short or overwritten says so, and does not wait") {
  const TemporaryFolder folder;
  const Store store = folder_store(folder);
  for (const bool cut : {true, false}) {
    const std::string key = cut ? "cut" : "longer";
    store->set(key, bytes_of("a value of some length"));
    std::string newest;
    for (const auto& entry : fs::directory_iterator(folder.path() + "/store")) {
      const std::string name = entry.path().filename();
      if (name.starts_with(key + "@")) newest = std::max(newest, name);
    }
    const std::string path = folder.path() + "/store/" + newest;
    if (cut) {
      fs::resize_file(path, 7);
    } else {
      std::ofstream(path, std::ios::app) << "x";
    }
    check_refused<std::runtime_error>([&] { store->get(key); }, newest + " is damaged");
  }
}

TEST_CASE("a FolderStore whose folder is removed says so at once") {
  const TemporaryFolder folder;
  const Store store = folder_store(folder);
  fs::remove_all(folder.path() + "/store");
  const std::string removed = folder.path() + "/store has been removed; keep it until all ranks of the job have ended";
  check_refused<std::runtime_error>([&] { store->set("key", bytes_of("value")); }, removed);
  check_refused<std::runtime_error>([&] { store->get("key"); }, removed);
}

TEST_CASE("a folder or file of somebody else's is refused as TESSERA_STORE") {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/store";
  std::ofstream(path) << "x";
  check_refused<std::runtime_error>([&] { folder_store(folder); }, "is not a folder of mode 0700 of this user");
  fs::remove(path);
  fs::create_directory(path);
  fs::permissions(path, fs::perms::owner_all);
  std::ofstream(path + "/thesis.tex") << "x";
  check_refused<std::runtime_error>([&] { folder_store(folder); }, "holds other files, such as thesis.tex");
  CHECK(fs::exists(path + "/thesis.tex"));
}

TEST_CASE("a process of an old job leaves a new job's folder at the same path alone") {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/store";
  auto old = std::make_unique<JobFolder>(path, kPatience);
  fs::remove_all(path);
  const Store fresh = folder_store(folder);
  fresh->set("key", bytes_of("value"));
  CHECK_FALSE(old->is_there());
  old.reset();
  CHECK(text_of(fresh->get("key")) == "value");
}

TEST_CASE("processes that start and end at one path at once never lose a file that one of them has written") {
  const TemporaryFolder folder;
  std::vector<pid_t> children;
  for (int i = 0; i < 4; ++i) {
    const pid_t child = fork();
    if (child != 0) {
      children.push_back(child);
      continue;
    }
    int failures = 0;
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(1500);
    while (std::chrono::steady_clock::now() < until) {
      try {
        const Store store = folder_store(folder, std::chrono::seconds(5));
        const std::string key = "of " + std::to_string(getpid());
        store->set(key, bytes_of("value"));
        failures += text_of(store->get(key)) == "value" ? 0 : 1;
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        ++failures;
      }
    }
    _exit(failures == 0 ? 0 : 1);
  }
  for (const pid_t child : children) {
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(status == 0);
  }
}

TEST_CASE("a process that holds the folder's lock, and is stopped, keeps nobody waiting longer than the limit") {
  const TemporaryFolder folder;
  fs::create_directory(folder.path() + "/store");
  fs::permissions(folder.path() + "/store", fs::perms::owner_all);
  const int lock = open((folder.path() + "/store").c_str(), O_RDONLY | O_DIRECTORY);
  REQUIRE(flock(lock, LOCK_EX) == 0);
  check_refused<std::runtime_error>([&] { folder_store(folder, std::chrono::milliseconds(200)); },
                                    "timed out waiting for the lock of");
  close(lock);
}

TEST_CASE("a forked process that ends leaves the folder to its parent") {
  const TemporaryFolder folder;
  const JobFolder held(folder.path() + "/store", kPatience);
  const pid_t child = fork();
  if (child == 0) {
    held.~JobFolder();
    _exit(0);
  }
  waitpid(child, nullptr, 0);
  CHECK(held.is_there());
  const JobFolder second(folder.path() + "/store", kPatience);
  CHECK(held.is_there());
}

TEST_CASE("a store whose server does not answer fails within the limit, then at once, and answers again later") {
  // Waits in every call until it is let go.
  struct Stuck : c10d::HashStore {
    std::mutex gate;
    bool check(const std::vector<std::string>& keys) override {
      const std::lock_guard lock(gate);
      return HashStore::check(keys);
    }
  };
  const auto stuck = c10::make_intrusive<Stuck>();
  const auto store = timed_store(stuck, std::chrono::milliseconds(300));
  CHECK_FALSE(store->check({"key"}));
  {
    const std::lock_guard lock(stuck->gate);
    check_refused<std::runtime_error>([&] { store->check({"key"}); }, "check timed out after 300 ms");
    const auto before = std::chrono::steady_clock::now();
    check_refused<std::runtime_error>([&] { store->set("key", std::string("x")); }, "an earlier call timed out");
    CHECK(std::chrono::steady_clock::now() - before < std::chrono::milliseconds(200));
  }
  for (int i = 0; i < 100; ++i) {
    try {
      store->set("key", std::string("value"));
      break;
    } catch (const std::exception&) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  CHECK(store->get_to_str("key") == "value");
}
