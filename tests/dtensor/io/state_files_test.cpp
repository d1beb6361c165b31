#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include "tessera/dtensor/io/block_checksums.h"
#include "tessera/dtensor/io/block_reader.h"
#include "tessera/dtensor/io/state_manifest.h"
#include "tessera/dtensor/io/state_plan.h"
#include "tessera/dtensor/io/state_writer.h"
#include "tessera/dtensor/io/step_folders.h"
#include "tessera/dtensor/io/training_state.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/in_process.h"
#include "tessera/mesh/world.h"
#include "tessera/tests/dtensor/io/other_remover.h"
#include "tessera/tests/dtensor/io/test_files.h"
#include "tessera/tools/launcher/child_process.h"

namespace tessera {
namespace {

std::string some_bytes(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::string bytes(static_cast<std::size_t>(count), '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

BlockChecksums checksums_of(const std::string& bytes, int64_t block_bytes) {
  BlockSums sums(static_cast<int64_t>(bytes.size()), block_bytes);
  sums.add(0, bytes.data(), static_cast<int64_t>(bytes.size()));
  return sums.checksums("f");
}

TEST_CASE("block checksums: they are zlib's CRC-32 of each block, the last one shorter") {
  CHECK(crc32_of("123456789") == 0xcbf43926);
  CHECK(crc32_of("") == 0);
  const std::string bytes = some_bytes(100, 1);
  const BlockChecksums all = checksums_of(bytes, 40);
  CHECK(all.file_bytes == 100);
  CHECK(all.crc32 == std::vector<uint32_t>{crc32_of(bytes.substr(0, 40)), crc32_of(bytes.substr(40, 40)),
                                           crc32_of(bytes.substr(80))});
  CHECK(checksums_of("", 40).crc32.empty());
  CHECK(block_count(80, 40) == 2);
  CHECK(block_count(81, 40) == 3);
  CHECK(block_count(INT64_MAX, kLargestBlock) == (int64_t{1} << 41));
}

TEST_CASE("block checksums: writers of any parts, in any order, sum up to the checksums of the whole") {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    const auto size = static_cast<int64_t>(random() % 300);
    const auto block_bytes = static_cast<int64_t>(1 + random() % 80);
    const std::string bytes = some_bytes(size, round);
    std::vector<BlockSums> writers(3, BlockSums(size, block_bytes));
    std::vector<std::pair<int64_t, int64_t>> parts;
    for (int64_t at = 0; at < size;) {
      const auto count = std::min<int64_t>(size - at, static_cast<int64_t>(1 + random() % 50));
      parts.emplace_back(at, count);
      at += count;
    }
    if (round % 2 == 0) std::ranges::shuffle(parts, random);
    for (const auto& [at, count] : parts) writers[random() % 3].add(at, bytes.data() + at, count);
    BlockSums joined(size, block_bytes);
    for (BlockSums& writer : writers) joined.add(writer.shares());
    REQUIRE(joined.checksums("f") == checksums_of(bytes, block_bytes));
  }
}

TEST_CASE("block checksums: a byte that nobody wrote, or two did, is an error") {
  BlockSums sums(10, 4);
  sums.add(0, "abcde", 5);
  CHECK_THROWS_WITH_AS(sums.checksums("f"), doctest::Contains("'f': the ranks wrote 1 bytes to block 1, which has 4"),
                       std::runtime_error);
  sums.add(4, "efghij", 6);
  CHECK_THROWS_WITH_AS(sums.checksums("f"), doctest::Contains("wrote 5 bytes to block 1"), std::runtime_error);
  CHECK_THROWS_WITH_AS(sums.add({{.block = 3, .bytes = 1, .sum = 0}}), doctest::Contains("block 3 in a file of 3"),
                       std::runtime_error);
}

TEST_CASE("block reader: it reads the blocks that a read touches, each once in ascending reads, and verifies them") {
  const TempFolder folder;
  const std::string bytes = some_bytes(1000, 5);
  write_text(folder / "f", bytes);
  BlockReader reader(folder / "f", checksums_of(bytes, 64));
  const auto read = [&](int64_t position, int64_t count) {
    std::string to(static_cast<std::size_t>(count), '\0');
    reader.read(position, count, to.data());
    return to;
  };
  CHECK(read(70, 10) == bytes.substr(70, 10));
  CHECK(reader.bytes_read() == 64);
  CHECK(read(80, 100) == bytes.substr(80, 100));  // blocks 1 (kept) and 2
  CHECK(reader.bytes_read() == 128);
  CHECK(read(990, 10) == bytes.substr(990));  // the last block has 40 bytes
  CHECK(reader.bytes_read() == 168);
  CHECK_THROWS_AS(read(990, 11), std::runtime_error);

  std::string wrong = bytes;
  wrong[640] ^= 1;  // the first byte of block 10
  write_text(folder / "g", wrong);
  BlockReader other(folder / "g", checksums_of(bytes, 64));
  std::string to(1000, '\0');
  CHECK_NOTHROW(other.read(0, 640, to.data()));
  CHECK_THROWS_WITH_AS(other.read(703, 1, to.data()), doctest::Contains("g': block 10 (bytes 640 to 703) has the"),
                       std::invalid_argument);
  CHECK_THROWS_AS(other.read(640, 64, to.data()), std::invalid_argument);
  CHECK_THROWS_WITH_AS(BlockReader(folder / "g", checksums_of(bytes.substr(1), 64)),
                       doctest::Contains("has 1000 bytes, not the 999 that were saved"), std::invalid_argument);
}

TEST_CASE("state plan: shares of a tile are disjoint, cover it, and are about 64 KiB or more") {
  CHECK(share_of(10, 4, 4, 3) == ShareOfTile{0, 10});
  CHECK(share_of(10, 4, 4, 0) == ShareOfTile{0, 0});
  CHECK(share_of(100000, 4, 2, 0) == ShareOfTile{0, 49152});
  CHECK(share_of(100000, 4, 2, 1) == ShareOfTile{49152, 100000});
  CHECK(share_of(0, 4, 3, 2) == ShareOfTile{0, 0});
  for (int64_t elements : {1, 20000, 65536, 1000003}) {
    int64_t end = 0;
    for (int64_t i = 0; i < 7; ++i) {
      const ShareOfTile share = share_of(elements, 2, 7, i);
      REQUIRE(share.first == end);
      REQUIRE(share.last >= share.first);
      end = share.last;
    }
    CHECK(end == elements);
  }
}

TEST_CASE("state plan: the runs of a share are those elements of the tile, in order") {
  using Run = std::pair<int64_t, int64_t>;
  const auto runs = [](const std::vector<int64_t>& shape, const Tile& tile, ShareOfTile share) {
    std::vector<Run> all;
    for_each_run(shape, tile, share, [&](int64_t begin, int64_t count) { all.emplace_back(begin, count); });
    return all;
  };
  const Tile inner = {{{1, 3}}, {{2, 5}}};
  CHECK(runs({4, 6}, inner, {0, 6}) == std::vector<Run>{{8, 3}, {14, 3}});
  CHECK(runs({4, 6}, inner, {0, 5}) == std::vector<Run>{{8, 3}, {14, 2}});
  CHECK(runs({4, 6}, inner, {4, 6}) == std::vector<Run>{{15, 2}});
  CHECK(runs({4, 6}, {{{1, 3}}, {{0, 6}}}, {0, 12}) == std::vector<Run>{{6, 12}});
  CHECK(runs({4, 6}, {{{0, 1}, {2, 3}}, {{0, 6}}}, {2, 12}) == std::vector<Run>{{2, 4}, {12, 6}});
  CHECK(runs({}, {}, {0, 1}) == std::vector<Run>{{0, 1}});
  CHECK(runs({3}, {{}}, {0, 0}).empty());
  CHECK(runs({2, 0}, {{{0, 2}}, {}}, {0, 0}).empty());
  // Every share of an irregular tile, compared with its elements one by one.
  const std::vector<int64_t> shape = {5, 4, 3};
  const Tile tile = {{{0, 2}, {3, 5}}, {{1, 2}, {3, 4}}, {{0, 3}}};
  std::vector<int64_t> elements;
  for (int64_t i : {0, 1, 3, 4}) {
    for (int64_t j : {1, 3}) {
      for (int64_t k : {0, 1, 2}) elements.push_back((i * 4 + j) * 3 + k);
    }
  }
  for (int64_t first = 0; first <= 24; ++first) {
    for (int64_t last = first; last <= 24; ++last) {
      std::vector<int64_t> got;
      for (const auto& [begin, count] : runs(shape, tile, {first, last})) {
        for (int64_t i = 0; i < count; ++i) got.push_back(begin + i);
      }
      REQUIRE(got == std::vector<int64_t>(elements.begin() + first, elements.begin() + last));
    }
  }
}

StateManifest sample_manifest() {
  return {.step = 7,
          .random = {.seed = UINT64_MAX, .counter = 3},
          .scheduler_steps = 5,
          .values = {{"position", "12"}, {"text", "\xc3\xa9\n\""}},
          .files = {{"f", {.file_bytes = 9, .block_bytes = 8, .crc32 = {1, 0xffffffff}}}, {"empty", {}}}};
}

TEST_CASE("state manifest: it is read as it was written, and any cut or changed byte is refused") {
  const StateManifest manifest = sample_manifest();
  const std::string text = serialize_state_manifest(manifest);
  const StateManifest again = parse_state_manifest(text, "m");
  CHECK(again.step == 7);
  CHECK(again.random.seed == UINT64_MAX);
  CHECK(again.random.counter == 3);
  CHECK(again.scheduler_steps == 5);
  CHECK(again.values == manifest.values);
  CHECK((again.files == manifest.files));
  CHECK(serialize_state_manifest(again) == text);
  for (std::size_t i = 0; i < text.size(); ++i) {
    REQUIRE_THROWS_WITH_AS(parse_state_manifest(text.substr(0, i), "m"), doctest::Contains("'m': "),
                           std::invalid_argument);
    std::string wrong = text;
    wrong[i] ^= 4;
    REQUIRE_THROWS_WITH_AS(parse_state_manifest(wrong, "m"), doctest::Contains("'m': "), std::invalid_argument);
  }
  CHECK(bytes_with_checksums(manifest) == static_cast<int64_t>(text.size()));
  StateManifest bad = manifest;
  bad.values["x"] = "\xff";
  CHECK_THROWS_WITH_AS(serialize_state_manifest(bad), doctest::Contains("is not UTF-8"), std::invalid_argument);
}

TEST_CASE("state manifest: its length is known before the checksums are") {
  StateManifest manifest = sample_manifest();
  manifest.files["f"].crc32.clear();
  CHECK(bytes_with_checksums(manifest) == static_cast<int64_t>(serialize_state_manifest(sample_manifest()).size()));
  manifest.files["f"].file_bytes = INT64_MAX;
  manifest.files["f"].block_bytes = 1;
  CHECK(bytes_with_checksums(manifest) > kMaxManifestBytes);
}

TEST_CASE("state manifest: a part that is missing, ill-typed or out of range is refused by name") {
  const std::string good = serialize_state_manifest(sample_manifest());
  const std::string state = good.substr(31, good.size() - 33);
  const auto message = [&](const std::string& from, const std::string& to) {
    std::string changed = state;
    const std::size_t at = changed.find(from);
    REQUIRE(at != std::string::npos);
    changed.replace(at, from.size(), to);
    char crc[9] = {};
    std::snprintf(crc, sizeof(crc), "%08x", crc32_of(changed));
    const std::string text = std::string("{\"crc32\": \"") + crc + "\", \"state\": " + changed + "}\n";
    return message_of([&] { parse_state_manifest(text, "m"); });
  };
  const auto contains = [](const std::string& text, const char* want) {
    CAPTURE(text);
    CAPTURE(want);
    CHECK(text.find(want) != std::string::npos);
  };
  contains(message("\"step\":7", "\"step\":7"), "nothing was thrown");
  contains(message("\"step\":7", "\"stop\":7"), "'step' is missing");
  contains(message("\"step\":7", "\"step\":-7"), "'step' is -7");
  contains(message("\"step\":7", "\"step\":9223372036854775808"), "'step' is 9223372036854775808");
  contains(message("\"version\":1", "\"version\":2"), "its version is 2");
  contains(message("\"step_count\":5", "\"step_count\":4294967296"), "'step_count' is 4294967296");
  contains(message("\"12\"", "12"), "'position' of 'values' is not text");
  contains(message("\"block_bytes\":8", "\"block_bytes\":0"), "a block of 0 bytes");
  contains(message("\"block_bytes\":8", "\"block_bytes\":9"), "there are 2 checksums for 1 blocks");
  contains(message("\"bytes\":9", "\"bytes\":9223372036854775807"), "2 checksums for 1152921504606846976 blocks");
  contains(message("ffffffff", "fffffff"), "is not a checksum");
  contains(message("\"step\":7", "\"step\":8,\"step\":7"), "'m': state: the key 'step' appears twice");
  contains(message("\"step\":7", "\"step\":" + std::string(64, '[') + std::string(64, ']')),
           "'m': state has lists or objects in each other, more than 64 deep");
  contains(message("\"step\":7", "\"step\":"), "'m': state is not valid JSON");
}

// Makes a folder that counts as a whole state.
void make_step(const std::string& folder, int64_t step) {
  const std::string path = folder + "/" + step_folder_name(step);
  std::filesystem::create_directories(path);
  write_text(path + "/f", "123456789");
  write_text(path + "/state.json",
             serialize_state_manifest({.step = step, .files = {{"f", checksums_of("123456789", 8)}}}));
}

std::vector<int64_t> steps_in(const std::string& folder) {
  std::vector<int64_t> steps;
  for (const auto& item : step_folders(folder)) steps.push_back(item.first);
  return steps;
}

int64_t entries_in(const std::string& folder) {
  return std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator());
}

TEST_CASE("step folders: the newest whole state is found; torn ones and other names are not") {
  const TempFolder folder;
  CHECK_FALSE(newest_training_state(folder / "none").has_value());
  CHECK_FALSE(newest_training_state(folder.path()).has_value());
  for (const int64_t step : {2, 30, 400, 123456789}) make_step(folder.path(), step);
  for (const char* name : {"step_5", "step_0000000x", "step_-0000001", ".step_00000900.tmp-1", "step_00000900x"})
    std::filesystem::create_directories(folder / name);
  CHECK(steps_in(folder.path()) == std::vector<int64_t>{2, 30, 400, 123456789});
  CHECK(newest_training_state(folder.path()) == folder / "step_123456789");
  std::filesystem::remove(folder / "step_123456789/state.json");
  CHECK(newest_training_state(folder.path()) == folder / "step_00000400");
  write_text(folder / "step_00000400/f", "12345678");
  CHECK(newest_training_state(folder.path()) == folder / "step_00000030");
  write_text(folder / "step_00000030/state.json", read_text(folder / "step_00000030/state.json").substr(0, 60));
  CHECK(newest_training_state(folder.path()) == folder / "step_00000002");
}

// Leaves this process no file descriptor for as long as it lives.
class NoDescriptors {
 public:
  NoDescriptors() {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit none = {.rlim_cur = 0, .rlim_max = before_.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &none);
  }
  ~NoDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;

 private:
  rlimit before_ = {};
};

TEST_CASE(
    "step folders: a process that cannot open them says why, and takes no state for torn, absent or superfluous") {
  const TempFolder folder;
  for (const int64_t step : {1, 2, 3}) make_step(folder.path(), step);
  const auto message_without_descriptors = [](const auto& act) -> std::string {
    try {
      const NoDescriptors none;
      act();
    } catch (const std::system_error& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  CHECK(message_without_descriptors([&] { newest_training_state(folder.path()); }) ==
        "cannot list '" + folder.path() + "': Too many open files");
  CHECK(message_without_descriptors([&] {
          is_whole_state(folder / "step_00000003");
        }).find("step_00000003/state.json': Too many open files") != std::string::npos);
  CHECK(message_without_descriptors([&] { keep_newest_steps(folder.path(), 1, 3); }) == "nothing was thrown");
  CHECK(steps_in(folder.path()) == std::vector<int64_t>{1, 2, 3});
  CHECK(newest_training_state(folder.path()) == folder / "step_00000003");
}

TEST_CASE("write_state: a rank whose folder has gone says why: the failure that made it go, though it comes later") {
  const TempFolder folder;
  std::string text;
  run_in_process(2, [&](const std::shared_ptr<World>& world) {
    barrier(init_device_mesh("cpu", {2}, {"tp"}, world), 0);
    if (world->rank() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      world->fail("train_step", "rank 0 has lost its disk");
      return;
    }
    StateJob job = {.rank = 1, .ranks = {0, 1}, .path = folder / "gone", .world = world};
    try {
      write_state(job);
    } catch (const std::exception& error) {
      text = error.what();
    }
  });
  CAPTURE(text);
  CHECK(text.find("rank 0 has lost its disk") != std::string::npos);
  CHECK(text.find("gone") == std::string::npos);
}

TEST_CASE("step folders: the newest whole ones are kept, and what was just saved in any case") {
  const TempFolder folder;
  for (const int64_t step : {1, 2, 3, 4, 5}) make_step(folder.path(), step);
  keep_newest_steps(folder.path(), 0, 5);
  CHECK(steps_in(folder.path()).size() == 5);
  std::filesystem::remove(folder / "step_00000005/f");  // not whole: it does not count
  keep_newest_steps(folder.path(), 2, 1);
  CHECK(steps_in(folder.path()) == std::vector<int64_t>{1, 3, 4, 5});
  CHECK(entries_in(folder.path()) == 4);
}

// Returns what spdlog's default logger writes while `act` runs.
template <typename Act>
std::string logged(const Act& act) {
  std::ostringstream out;
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(out)));
  act();
  spdlog::set_default_logger(before);
  return out.str();
}

// Makes a folder whose path has so many bytes.
std::string make_long_folder(std::string path, std::size_t bytes) {
  constexpr std::size_t kName = 200;
  while (path.size() < bytes) {
    const std::size_t left = bytes - path.size();
    path += "/" + std::string(left > kName + 50 ? kName : left - 1, 'd');
  }
  std::filesystem::create_directories(path);
  return path;
}

TEST_CASE("step folders: an old state that cannot be removed stays, with a warning, since the new one is saved") {
  const TempFolder folder;
  // A path may have 4095 bytes: the states' files have fewer, the longer name that a state gets before has more.
  const std::string root = make_long_folder(folder.path(), 4065);
  for (const int64_t step : {1, 2}) make_step(root, step);
  const std::string text = logged([&] { keep_newest_steps(root, 1, 2); });
  CAPTURE(text);
  CHECK(text.find("step_00000001' cannot be removed: File name too long") != std::string::npos);
  CHECK(steps_in(root) == std::vector<int64_t>{1, 2});
  CHECK(entries_in(root) == 2);
}

TEST_CASE("step folders: a new one that another job takes for abandoned, before it is locked, is not used") {
  for (const bool at_once : {true, false}) {
    CAPTURE(at_once);
    const TempFolder folder;
    OtherRemover other(at_once);
    NewStepFolder step(folder.path(), 1);
    REQUIRE(other.path().find("/.step_00000001.tmp-") != std::string::npos);
    other.finish();
    write_text(step.path() + "/f", "x");
    step.publish();
    CHECK(read_text(folder / "step_00000001/f") == "x");
    CHECK(entries_in(folder.path()) == 1);
  }
}

TEST_CASE("step folders: one appears whole under its name, replaces an older one, and goes when it is given up") {
  const TempFolder folder;
  const std::string root = folder / "new";
  {
    NewStepFolder given_up(root, 3);
    write_text(given_up.path() + "/f", "x");
    CHECK(steps_in(root).empty());
  }
  CHECK(entries_in(root) == 0);
  for (const char* text : {"first", "second"}) {
    NewStepFolder one(root, 3);
    NewStepFolder other(root, 3);  // a second job: it does not take the first one's folder for abandoned
    CHECK(one.path() != other.path());
    write_text(one.path() + "/f", text);
    one.publish();
    CHECK(read_text(root + "/step_00000003/f") == text);
  }
  CHECK(entries_in(root) == 1);
  CHECK_THROWS_WITH_AS(NewStepFolder("/proc/none", 1), doctest::Contains("cannot make the folder '/proc/none'"),
                       std::runtime_error);
}

TEST_CASE("step folders: what a killed process left is removed by the next save") {
  const TempFolder folder;
  const pid_t child = start_child([&] {
    const NewStepFolder left(folder.path(), 1);
    write_text(left.path() + "/f", "half");
    return ::kill(::getpid(), SIGKILL);
  });
  REQUIRE(wait_for(child) == 1000 + SIGKILL);
  CHECK(entries_in(folder.path()) == 1);
  { NewStepFolder next(folder.path(), 2); }
  CHECK(entries_in(folder.path()) == 0);
}

}  // namespace
}  // namespace tessera
