#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// Is the largest block that has a checksum of its own.
inline constexpr int64_t kLargestBlock = int64_t{4} << 20;

// Is the size of a block unless the user says otherwise: a rank that loads reads whole blocks, and checksums of smaller
// ones would make state.json long.
inline constexpr int64_t kUsualBlock = int64_t{256} << 10;

// Holds the CRC-32 of each block of a file, as zlib and Python's zlib.crc32 compute it. All blocks have block_bytes but
// the last, which may be shorter.
struct BlockChecksums {
  int64_t file_bytes = 0;
  int64_t block_bytes = kLargestBlock;
  std::vector<uint32_t> crc32;

  friend bool operator==(const BlockChecksums&, const BlockChecksums&) = default;
};

// Holds the checksums of files by their names, without folders.
using FileChecksums = std::map<std::string, BlockChecksums, std::less<>>;

uint32_t crc32_of(const void* data, int64_t count);
inline uint32_t crc32_of(std::string_view text) { return crc32_of(text.data(), static_cast<int64_t>(text.size())); }
int64_t block_count(int64_t file_bytes, int64_t block_bytes);
int64_t block_size(int64_t file_bytes, int64_t block_bytes, int64_t block);

// Holds what one writer adds to the checksum of one block: the number of its bytes in the block, and their sum.
struct BlockShare {
  int64_t block = 0;
  int64_t bytes = 0;
  uint32_t sum = 0;

  friend bool operator==(const BlockShare&, const BlockShare&) = default;
};

// Sums up the checksums of one file whose bytes several writers write, in any order. CRC-32 is linear: a block's
// checksum is the exclusive or of what each byte adds by its value and its place. So each writer sums up its own bytes,
// and nobody reads the file.
//
//   rank 0: sums.add(0, "abc", 3)         rank 1: sums.add(3, "def", 3)
//   somewhere: sums.add(shares of rank 0); sums.add(shares of rank 1); sums.checksums("f")
class BlockSums {
 public:
  BlockSums(int64_t file_bytes, int64_t block_bytes);

  // Adds `count` bytes at `position`, which must be within the file.
  void add(int64_t position, const void* data, int64_t count);
  // Adds another writer's bytes. Throws std::runtime_error on a block that the file does not have.
  void add(const std::vector<BlockShare>& shares);

  // Returns what add() has collected, for the blocks that have any bytes.
  std::vector<BlockShare> shares();
  // Returns the checksums. Throws std::runtime_error, with `file` in its text, unless as many bytes were added to each
  // block as it has.
  BlockChecksums checksums(const std::string& file);

 private:
  void add_in_block(int64_t block, int64_t position, const void* data, int64_t count);
  void close_run();
  uint32_t shifted(uint32_t sum, int64_t bytes);

  const int64_t file_bytes_;
  const int64_t block_bytes_;
  std::vector<uint32_t> sums_;
  std::vector<int64_t> counts_;
  // The sum of the bytes that were added last, as if they ended their block at run_end_; -1: there are none.
  int64_t run_block_ = -1;
  int64_t run_end_ = 0;
  uint32_t run_sum_ = 0;
  // The operator that shifts a sum by shift_bytes_. Rows of a matrix need the same one again and again.
  int64_t shift_bytes_ = 0;
  uint32_t shift_ = 0;
};

}  // namespace tessera
