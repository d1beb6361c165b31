#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "tessera/dtensor/io/block_checksums.h"
#include "tessera/dtensor/io/file_descriptor.h"

namespace tessera {

// Says that a file's bytes are not those that were saved.
class DamagedFile : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Says whether a system error means that the disk has lost a file's bytes: EIO, EBADMSG or EUCLEAN. Others, such as a
// lack of file descriptors or of memory, tell nothing about the file.
bool means_damage(const std::error_code& error);

// Reads parts of a file: with checksums whole blocks, each of which is verified before a byte of it is returned;
// without them the asked bytes alone. A block that was read in part is kept, up to 16 of them, so that reads in
// ascending order read a block once. The open file stays the same when another is renamed over its path. It can be
// moved, not copied.
class BlockReader {
 public:
  // Opens the file. Throws std::runtime_error when the system cannot open it, std::invalid_argument when it is not a
  // regular file, DamagedFile when it has another size than `checksums` say.
  explicit BlockReader(const std::string& path, std::optional<BlockChecksums> checksums = std::nullopt);

  const std::string& path() const { return path_; }
  int64_t file_bytes() const { return file_bytes_; }
  bool verifies() const { return checksums_.has_value(); }

  // Reads bytes [position, position + count) into `to`. Throws std::runtime_error when the system cannot, or the file
  // ends before; DamagedFile that names the file, the block and both checksums when a block is not what was written.
  // After a throw the bytes in `to` are unspecified.
  void read(int64_t position, int64_t count, void* to);

  // Frees the blocks that are kept; a block that is asked for again is read again.
  void drop_kept() { kept_.clear(); }

  // Returns the bytes that were read from the file so far.
  int64_t bytes_read() const { return bytes_read_; }

 private:
  struct KeptBlock {
    int64_t block = 0;
    std::vector<char> bytes;
  };
  void read_block(int64_t block, void* to);
  const char* kept_block(int64_t block);

  std::string path_;
  std::optional<BlockChecksums> checksums_;
  int64_t file_bytes_ = 0;
  FileDescriptor file_;
  std::list<KeptBlock> kept_;  // the one that was used last is the first
  int64_t bytes_read_ = 0;
};

// Returns the content of a whole file of at most `largest` bytes. Throws as BlockReader, and std::invalid_argument on a
// longer one.
std::string read_whole_file(const std::string& path, int64_t largest,
                            std::optional<BlockChecksums> checksums = std::nullopt);

}  // namespace tessera
