#include <algorithm>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/dtensor/io/block_checksums.h"
#include "tessera/dtensor/io/block_reader.h"
#include "tessera/dtensor/io/state_manifest.h"
#include "tessera/dtensor/io/state_plan.h"
#include "tessera/tests/dtensor/io/changed_manifest.h"
#include "tessera/tests/dtensor/io/test_files.h"

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
  reader.drop_kept();
  CHECK(read(990, 10) == bytes.substr(990));
  CHECK(reader.bytes_read() == 208);
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
          .loss_scaler = {{.scale = 0x1.8p-20, .good_steps = 1999}},
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
  CHECK((again.loss_scaler == manifest.loss_scaler));
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
  const auto message = [&](const std::string& from, const std::string& to) {
    const std::string text = changed_manifest(good, from, to);
    return message_of([&] { parse_state_manifest(text, "m"); });
  };
  const auto contains = [](const std::string& text, const char* want) {
    CAPTURE(text);
    CAPTURE(want);
    CHECK(text.find(want) != std::string::npos);
  };
  contains(message("\"step\":7", "\"step\":7"), "nothing was thrown");
  contains(message("\"step\":7", "\"stop\":7"), "'step' is missing");
  contains(message("\"step\":7", "\"step\":-7"), "'step' is '-7'");
  contains(message("\"step\":7", "\"step\":\"" + std::string(200, 'x') + "\""), "xxx...' (202 bytes), not a number");
  contains(message("\"step\":7", "\"step\":9223372036854775808"), "'step' is '9223372036854775808'");
  contains(message("\"version\":1", "\"version\":2"), "its version is 2, and this program reads version 1");
  CHECK_THROWS_AS(parse_state_manifest(changed_manifest(good, "\"version\":1", "\"version\":2"), "m"), OtherVersion);
  contains(message("\"step_count\":5", "\"step_count\":4294967296"), "'step_count' is '4294967296'");
  contains(message("\"12\"", "12"), "'position' of 'values' is not text");
  contains(message("\"block_bytes\":8", "\"block_bytes\":0"), "a block of 0 bytes");
  contains(message("\"block_bytes\":8", "\"block_bytes\":9"), "there are 2 checksums for 1 blocks");
  contains(message("\"bytes\":9", "\"bytes\":9223372036854775807"), "2 checksums for 1152921504606846976 blocks");
  contains(message("ffffffff", "fffffff"), "is not a checksum");
  for (const char* const name : {"../f", "/f", "a/f", "..", ".", ""}) {
    contains(message("\"f\":", "\"" + std::string(name) + "\":"), "' is not the name of a file in its folder");
  }
  contains(message("\"step\":7", "\"step\":8,\"step\":7"), "'m': state: the key 'step' appears twice");
  contains(message("\"step\":7", "\"step\":" + std::string(64, '[') + std::string(64, ']')),
           "'m': state has lists or objects in each other, more than 64 deep");
  contains(message("\"step\":7", "\"step\":"), "'m': state is not valid JSON");
}

}  // namespace
}  // namespace tessera
