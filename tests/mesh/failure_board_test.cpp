#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/mesh/core/within.h"
#include "tessera/mesh/failure.h"
#include "tessera/tests/harness/skip.h"
#include "tessera/tests/mesh/temporary_folder.h"

using namespace tessera;
using tessera::testing::TemporaryFolder;
namespace fs = std::filesystem;

namespace {

constexpr auto kAtOnce = std::chrono::milliseconds::zero();

FailureBoard::Options options_of(int64_t rank, int64_t size, const c10::intrusive_ptr<c10d::Store>& store) {
  FailureBoard::Options options;
  options.store = store;
  options.rank = rank;
  options.size = size;
  return options;
}

// Returns what rank 0 of two finds in the launcher's notes, "nothing", or "it waits".
std::string found_in_notes(const std::string& path) {
  FailureBoard::Options options = options_of(0, 2, c10::make_intrusive<c10d::HashStore>());
  options.lost_file = path;
  const auto board = std::make_shared<FailureBoard>(options);
  try {
    const std::optional<Failure> found =
        within(std::chrono::seconds(5), "looking", [board] { return board->search({1}, kAtOnce); });
    return found ? to_string(*found) : "nothing";
  } catch (const LateError&) {
    return "it waits";
  }
}

// Returns the id of a process that is not there any more.
pid_t ended_process() {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(0);
  ::waitpid(pid, nullptr, 0);
  return pid;
}

// Leaves this process no file descriptor while it lives.
class NoDescriptors {
 public:
  NoDescriptors() {
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &before_) == 0);
    rlimit few = before_;
    few.rlim_cur = 128;
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &few) == 0);
    for (int fd; (fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;) used_.push_back(fd);
  }
  ~NoDescriptors() {
    for (const int fd : used_) ::close(fd);
    ::setrlimit(RLIMIT_NOFILE, &before_);
  }
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;

 private:
  rlimit before_{};
  std::vector<int> used_;
};

}  // namespace

// Has no space for the key of rank 1, as long as it is full.
class FullStore : public c10d::HashStore {
 public:
  bool is_full = true;

  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    if (is_full && key == "tessera/process/1") throw std::runtime_error("cannot make a file: No space left on device");
    return HashStore::compareSet(key, expected, desired);
  }
};

TEST_CASE("a rank that cannot join does not end a job on the same store that has all its ranks") {
  const auto store = c10::make_intrusive<FullStore>();
  store->is_full = false;
  FailureBoard first(options_of(0, 2, store));
  const FailureBoard second(options_of(1, 2, store));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  store->is_full = true;
  FailureBoard::Options late = options_of(1, 2, store);
  late.timeout = std::chrono::milliseconds(1);
  CHECK_THROWS_WITH(FailureBoard{late}, "cannot make a file: No space left on device");
  CHECK_FALSE(first.find().has_value());
}

TEST_CASE("a rank that cannot join, since the store has no space for its key, says so to the others") {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<FullStore>();
  FailureBoard first(options_of(0, 2, store));
  CHECK_THROWS_WITH(FailureBoard(options_of(1, 2, store)), "cannot make a file: No space left on device");
  const std::optional<Failure> found = first.find();
  REQUIRE(found.has_value());
  CHECK(found->rank == 1);
  CHECK(found->where == "joining the other ranks");
  CHECK(found->text == "cannot make a file: No space left on device");
}

TEST_CASE("a launcher's note names the rank that was lost, also before it joined") {
  const TemporaryFolder folder;
  const std::string note = folder.path() + "/store.lost";
  CHECK(found_in_notes(note) == "nothing");
  std::ofstream(note + ".1") << "rank 1 exited with code 0\n";
  CHECK(found_in_notes(note) == "a peer was lost: rank 1 exited with code 0 before it joined the others");
  std::ofstream(note) << "rank 1 was killed by signal 9";
  CHECK(found_in_notes(note) == "a peer was lost: rank 1 was killed by signal 9");
}

TEST_CASE("a FIFO, a folder or a link where a launcher's note would be is not read, and nobody waits for it") {
  for (const std::string end : {"", ".1"}) {
    for (const std::string what : {"fifo", "folder", "link"}) {
      CAPTURE(end);
      CAPTURE(what);
      const TemporaryFolder folder;
      const std::string note = folder.path() + "/store.lost", target = folder.path() + "/target";
      std::ofstream(target) << "rank 1 was killed by signal 9";
      if (what == "fifo") REQUIRE(::mkfifo((note + end).c_str(), 0666) == 0);
      if (what == "folder") fs::create_directory(note + end);
      if (what == "link") fs::create_symlink(target, note + end);
      CHECK(found_in_notes(note) == "nothing");
    }
  }
}

TEST_CASE("what another user has put where a launcher's note would be is not read") {
  const TemporaryFolder folder;
  const std::string note = folder.path() + "/store.lost";
  for (const std::string end : {"", ".1"}) {
    std::ofstream(note + end) << "rank 1 was killed by signal 9";
    if (::chown((note + end).c_str(), ::geteuid() + 1, static_cast<gid_t>(-1)) != 0) {
      TESSERA_SKIP(fmt::format("this user cannot give a file to another one: {}", std::strerror(errno)));
    }
  }
  CHECK(found_in_notes(note) == "nothing");
}

TEST_CASE(
    "a rank that has no descriptor left still finds the launcher's note and the end of a peer, and says its lack") {
  const TemporaryFolder folder;
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  FailureBoard::Options options = options_of(0, 2, store);
  options.lost_file = folder.path() + "/store.lost";
  FailureBoard board(options);
  std::string process = store->get_to_str("tessera/process/0");
  process.replace(0, process.find(' '), std::to_string(ended_process()));
  store->set("tessera/process/1", process);
  std::ofstream(folder.path() + "/note") << "rank 1 was killed by signal 9";
  CHECK(board.what_is_lacking().empty());
  std::optional<Failure> ended, noted;
  std::string before, after;
  {
    const NoDescriptors none;
    before = board.what_is_lacking();
    ended = board.search({1}, kAtOnce);
    fs::rename(folder.path() + "/note", options.lost_file);
    noted = board.find();
    after = board.what_is_lacking();
  }
  CHECK(before.find("no file descriptor left (Too many open files)") != std::string::npos);
  CHECK(after == before);
  CHECK(board.what_is_lacking().empty());
  REQUIRE(ended.has_value());
  CHECK(to_string(*ended) == "a peer was lost: the process of rank 1 has ended");
  REQUIRE(noted.has_value());
  CHECK(to_string(*noted) == "a peer was lost: rank 1 was killed by signal 9");
}

TEST_CASE(
    "who is missing: ranks that do not answer, and ranks that are busy where the rank that waited waits for them") {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  const Failure failure{.kind = Failure::Kind::kTimeout, .rank = 0, .where = "all_reduce", .text = "timed out"};
  FailureBoard waiter(options_of(0, 4, store)), elsewhere(options_of(2, 4, store)), busy(options_of(3, 4, store));
  for (FailureBoard* const board : {&waiter, &elsewhere, &busy}) board->acknowledge(failure);
  for (FailureBoard* const board : {&waiter, &elsewhere}) board->announce_arrival();
  // The ranks of a group may be in any order.
  CHECK(waiter.who_is_missing({3, 1, 0}, kAtOnce) == "; ranks [1] do not answer; ranks [3] did not come to it");
  CHECK(elsewhere.who_is_missing({0, 3, 2}, kAtOnce) == "; ranks [3] did not come to it");
  // Rank 0 has not waited for these.
  const std::string busy_here = "; ranks [3] did not come to the collective of this rank";
  CHECK(elsewhere.who_is_missing({2, 3}, kAtOnce) == busy_here);
  CHECK(elsewhere.who_is_missing({3, 2, 1}, kAtOnce) == "; ranks [1] do not answer" + busy_here);
}

TEST_CASE("ranks with other settings are told so, those that have joined too") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  FailureBoard::Options first = options_of(0, 2, store), second = options_of(1, 2, store);
  first.settings = "collectives checked";
  second.settings = "collectives not checked";
  FailureBoard board(first);
  CHECK_THROWS_WITH(FailureBoard{second},
                    doctest::Contains("rank 1 has other settings than the ranks before it: collectives not checked "
                                      "here, collectives checked there"));
  const std::optional<Failure> found = board.find();
  REQUIRE(found.has_value());
  CHECK(found->rank == 1);
  CHECK(found->text.find("give every rank the same WorldOptions") != std::string::npos);
}
