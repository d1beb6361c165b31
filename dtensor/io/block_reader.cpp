#include "tessera/dtensor/io/block_reader.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

namespace tessera {
namespace {

constexpr std::size_t kMostKept = 16;

}  // namespace

bool means_damage(const std::error_code& error) {
  const int value = error.value();
  return value == EIO || value == EBADMSG || value == EUCLEAN;
}

BlockReader::BlockReader(const std::string& path, std::optional<BlockChecksums> checksums)
    : path_(path), checksums_(std::move(checksums)), file_(open_regular_file(path, file_bytes_)) {
  if (!checksums_ || checksums_->file_bytes == file_bytes_) return;
  throw DamagedFile(
      fmt::format("'{}' has {} bytes, not the {} that were saved", path, file_bytes_, checksums_->file_bytes));
}

void BlockReader::read_block(int64_t block, void* to) {
  const int64_t begin = block * checksums_->block_bytes;
  const int64_t size = block_size(file_bytes_, checksums_->block_bytes, block);
  read_at(file_, path_, begin, size, to);
  bytes_read_ += size;
  const uint32_t found = crc32_of(to, size);
  const uint32_t saved = checksums_->crc32.at(static_cast<std::size_t>(block));
  if (found == saved) return;
  throw DamagedFile(fmt::format(
      "'{}': block {} (bytes {} to {}) has the checksum {:08x}, not {:08x} as saved: the file was changed or "
      "damaged since; load another checkpoint",
      path_, block, begin, begin + size - 1, found, saved));
}

const char* BlockReader::kept_block(int64_t block) {
  auto found = std::ranges::find(kept_, block, &KeptBlock::block);
  if (found == kept_.end()) {
    KeptBlock fresh = {.block = block, .bytes = {}};
    // The memory of the block that was used longest ago is taken.
    if (kept_.size() == kMostKept) {
      fresh.bytes = std::move(kept_.back().bytes);
      kept_.pop_back();
    }
    fresh.bytes.resize(static_cast<std::size_t>(block_size(file_bytes_, checksums_->block_bytes, block)));
    read_block(block, fresh.bytes.data());
    kept_.push_front(std::move(fresh));
    found = kept_.begin();
  }
  kept_.splice(kept_.begin(), kept_, found);
  return kept_.front().bytes.data();
}

void BlockReader::read(int64_t position, int64_t count, void* to) {
  if (!checksums_) {
    read_at(file_, path_, position, count, to);
    bytes_read_ += count;
    return;
  }
  if (position < 0 || count > file_bytes_ - position)
    throw std::runtime_error(fmt::format("'{}' ends before byte {}", path_, position + count));
  auto* at = static_cast<char*>(to);
  while (count > 0) {
    const int64_t block = position / checksums_->block_bytes;
    const int64_t skipped = position - block * checksums_->block_bytes;
    const int64_t size = block_size(file_bytes_, checksums_->block_bytes, block);
    const int64_t here = std::min(count, size - skipped);
    if (here == size) {
      read_block(block, at);  // all of it is asked for, so that it need not be kept
    } else {
      std::memcpy(at, kept_block(block) + skipped, static_cast<std::size_t>(here));
    }
    at += here;
    position += here;
    count -= here;
  }
}

std::string read_whole_file(const std::string& path, int64_t largest, std::optional<BlockChecksums> checksums) {
  BlockReader reader(path, std::move(checksums));
  if (reader.file_bytes() > largest) {
    throw std::invalid_argument(fmt::format("'{}' has {} bytes, more than {}", path, reader.file_bytes(), largest));
  }
  std::string text(static_cast<std::size_t>(reader.file_bytes()), '\0');
  reader.read(0, reader.file_bytes(), text.data());
  return text;
}

}  // namespace tessera
