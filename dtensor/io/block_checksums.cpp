#include "tessera/dtensor/io/block_checksums.h"

#include <algorithm>
#include <stdexcept>

#include <fmt/format.h>
#include <libdeflate.h>
#include <zlib.h>

namespace tessera {
namespace {

constexpr uint32_t kOnes = 0xffffffff;

// Both libraries compute the same checksum. libdeflate's is about three times as fast, and zlib's can be combined.
uint32_t crc_from(uint32_t before, const void* data, int64_t count) {
  return ::libdeflate_crc32(before, data, static_cast<std::size_t>(count));
}

// Returns the linear part of the checksum. The register is inverted before and after; with all ones given, it begins at
// 0.
uint32_t linear_crc(const void* data, int64_t count) { return crc_from(kOnes, data, count) ^ kOnes; }

}  // namespace

uint32_t crc32_of(const void* data, int64_t count) { return crc_from(0, data, count); }

int64_t block_count(int64_t file_bytes, int64_t block_bytes) {
  return file_bytes / block_bytes + (file_bytes % block_bytes != 0);
}

int64_t block_size(int64_t file_bytes, int64_t block_bytes, int64_t block) {
  return std::min(block_bytes, file_bytes - block * block_bytes);
}

BlockSums::BlockSums(int64_t file_bytes, int64_t block_bytes)
    : file_bytes_(file_bytes),
      block_bytes_(block_bytes),
      sums_(static_cast<std::size_t>(block_count(file_bytes, block_bytes))),
      counts_(sums_.size()) {}

// Returns the sum of the same bytes with `bytes` zeros after them.
uint32_t BlockSums::shifted(uint32_t sum, int64_t bytes) {
  if (sum == 0 || bytes == 0) return sum;
  if (bytes != shift_bytes_) {
    shift_bytes_ = bytes;
    shift_ = static_cast<uint32_t>(::crc32_combine_gen(static_cast<z_off_t>(bytes)));
  }
  return static_cast<uint32_t>(::crc32_combine_op(sum, 0, shift_));
}

void BlockSums::close_run() {
  if (run_block_ < 0) return;
  const int64_t block_end = run_block_ * block_bytes_ + block_size(file_bytes_, block_bytes_, run_block_);
  sums_[static_cast<std::size_t>(run_block_)] ^= shifted(run_sum_, block_end - run_end_);
  run_block_ = -1;
}

void BlockSums::add_in_block(int64_t block, int64_t position, const void* data, int64_t count) {
  if (block != run_block_ || position < run_end_) {
    close_run();
    run_block_ = block;
    run_end_ = position;
    run_sum_ = 0;
  }
  run_sum_ = shifted(run_sum_, position + count - run_end_) ^ linear_crc(data, count);
  run_end_ = position + count;
  counts_[static_cast<std::size_t>(block)] += count;
}

void BlockSums::add(int64_t position, const void* data, int64_t count) {
  const auto* at = static_cast<const char*>(data);
  while (count > 0) {
    const int64_t block = position / block_bytes_;
    const int64_t here = std::min(count, (block + 1) * block_bytes_ - position);
    add_in_block(block, position, at, here);
    at += here;
    position += here;
    count -= here;
  }
}

void BlockSums::add(const std::vector<BlockShare>& shares) {
  for (const BlockShare& share : shares) {
    if (share.block < 0 || share.block >= static_cast<int64_t>(sums_.size())) {
      throw std::runtime_error(fmt::format("a share of block {} in a file of {} blocks", share.block, sums_.size()));
    }
    sums_[static_cast<std::size_t>(share.block)] ^= share.sum;
    counts_[static_cast<std::size_t>(share.block)] += share.bytes;
  }
}

std::vector<BlockShare> BlockSums::shares() {
  close_run();
  std::vector<BlockShare> result;
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    if (counts_[i] > 0) result.push_back({static_cast<int64_t>(i), counts_[i], sums_[i]});
  }
  return result;
}

BlockChecksums BlockSums::checksums(const std::string& file) {
  close_run();
  BlockChecksums result = {.file_bytes = file_bytes_, .block_bytes = block_bytes_, .crc32 = {}};
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    const int64_t size = block_size(file_bytes_, block_bytes_, static_cast<int64_t>(i));
    if (counts_[i] != size) {
      throw std::runtime_error(fmt::format(
          "'{}': the ranks wrote {} bytes to block {}, which has {}; on slices of a mesh, such as mesh[\"tp\"]"
          " of {{dp, tp}}, save with the ranks of one slice",
          file, counts_[i], i, size));
    }
    // All ones in the register before the first byte, and inverted after the last.
    result.crc32.push_back(sums_[i] ^ shifted(kOnes, size) ^ kOnes);
  }
  return result;
}

}  // namespace tessera
