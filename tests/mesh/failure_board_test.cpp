#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/stat.h>
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

}  // namespace

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
