#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/io/block_reader.h"
#include "tessera/dtensor/io/safetensors_header.h"

namespace tessera {

// Describes a part of a tensor: elements [offsets[d], offsets[d] + sizes[d]) of each dimension d.
struct TensorBox {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;

  friend bool operator==(const TensorBox&, const TensorBox&) = default;
};

// Returns the box of a whole tensor of this shape.
TensorBox whole_box(const std::vector<int64_t>& shape);

// Lists contiguous runs of elements of a row-major tensor, in order. All have the same length, and adjacent ones are
// merged.
struct ElementRuns {
  std::vector<int64_t> starts;
  int64_t length = 0;
};

// Describes `size` elements of a row-major tensor that are `stride` elements apart.
struct Loop {
  int64_t size = 1;
  int64_t stride = 1;

  friend auto operator<=>(const Loop&, const Loop&) = default;
};

// Returns loops over the same elements in the same order, as few as possible. The loops are nested: each stride is at
// least the next one's size times its stride.
std::vector<Loop> merged_loops(const std::vector<Loop>& loops);

// Returns the runs of the elements offset + sum of i_k * loops[k].stride, for all 0 <= i_k < loops[k].size, of nested
// loops.
ElementRuns runs_of_loops(int64_t offset, const std::vector<Loop>& loops);

// Returns the runs that make up `box` of a tensor of `shape`.
//   shape {4, 6}, box {1, 0} {2, 6} -> one run of 12 at 6;  box {1, 2} {2, 3} -> runs of 3 at 8 and 14
ElementRuns box_runs(const std::vector<int64_t>& shape, const TensorBox& box);

// Reads a safetensors file. Opening it reads and checks only the header; parts of tensors are read later by pread, not
// by mapping, so that a file that shrinks gives an error and not a signal. The open file stays the same when another is
// renamed over its path. It can be moved, not copied. Threads may share what the header gives (tensors, metadata,
// find), but not what reads, which changes the reader without a lock.
class SafetensorsFile {
 public:
  // Opens the file. Throws std::runtime_error when the system cannot open or read `path`, std::invalid_argument when it
  // is not a safetensors file (see parse_safetensors_header). With `checksums` every read is verified: see BlockReader.
  explicit SafetensorsFile(const std::string& path, std::optional<BlockChecksums> checksums = std::nullopt);

  const std::string& path() const { return reader_.path(); }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  // Returns the tensors in the order of their data.
  const std::vector<TensorEntry>& tensors() const { return header_.tensors; }
  // Returns nullptr when there is no tensor of that name.
  const TensorEntry* find(std::string_view name) const;

  // Reads the bytes of `box`, and no others (with checksums the blocks that they touch), into a new contiguous CPU
  // tensor of shape box.sizes. `entry` must be one of tensors(). Throws std::invalid_argument on a box outside the
  // tensor, and on data that its dtype cannot hold (a bool that is neither 0 nor 1); std::runtime_error when reading
  // fails.
  //
  // With a device other than the CPU the tensor is there, and is copied in parts while the next ones are read: see
  // TwoBuffers.
  at::Tensor read_box(const TensorEntry& entry, const TensorBox& box, c10::Device device = at::kCPU) const;
  at::Tensor read(const TensorEntry& entry) const { return read_box(entry, whole_box(entry.shape)); }
  // Reads the bytes of `runs`, and no others, one run after the other into a 1-D tensor. Throws as read_box does.
  at::Tensor read_runs(const TensorEntry& entry, const ElementRuns& runs, c10::Device device = at::kCPU) const;

  // Frees the blocks that are kept for further reads (see BlockReader). Opening the file does so too.
  void drop_kept() const { reader_.drop_kept(); }

  // Returns the bytes of data read so far, without the header; with checksums, the bytes of the blocks read so far.
  int64_t bytes_read() const { return reader_.bytes_read() - (reader_.verifies() ? 0 : data_start_); }

  // Returns the header, the file's size and the first 64 bytes of each tensor, which it reads: files of different steps
  // of a training differ in it.
  std::string fingerprint() const;

 private:
  // Reads `count` bytes, from byte `position` on, of the runs put one after the other.
  void read_bytes(const TensorEntry& entry, const ElementRuns& runs, int64_t position, int64_t count, char* to) const;

  mutable BlockReader reader_;  // it counts and keeps blocks
  SafetensorsHeader header_;
  std::map<std::string_view, std::size_t, std::less<>> by_name_;
  int64_t data_start_ = 0;
};

}  // namespace tessera
