#include "tessera/dtensor/io/safetensors_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <stdexcept>
#include <utility>

#include <ATen/Functions.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/io/strict_json.h"
#include "tessera/dtensor/io/two_buffers.h"

namespace tessera {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian and is read as it is");

constexpr int64_t kLengthBytes = 8;

int64_t header_length(const std::array<unsigned char, kLengthBytes>& bytes, int64_t file_bytes,
                      const std::string& path) {
  uint64_t length = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) length |= static_cast<uint64_t>(bytes[i]) << (8 * i);
  if (length > static_cast<uint64_t>(kMaxHeaderBytes)) {
    throw std::invalid_argument(
        fmt::format("'{}': its first 8 bytes say that the header has {} bytes, more than the format's "
                    "{}; not a safetensors file",
                    path, length, kMaxHeaderBytes));
  }
  const auto signed_length = static_cast<int64_t>(length);
  if (signed_length > file_bytes - kLengthBytes) {
    throw std::invalid_argument(
        fmt::format("'{}': its first 8 bytes say that the header has {} bytes, but {} follow; the file "
                    "is cut off or not a safetensors file",
                    path, length, file_bytes - kLengthBytes));
  }
  return signed_length;
}

void check_box(const TensorEntry& entry, const TensorBox& box, const std::string& path) {
  const std::size_t dims = entry.shape.size();
  bool inside = box.offsets.size() == dims && box.sizes.size() == dims;
  for (std::size_t d = 0; inside && d < dims; ++d) {
    inside = box.offsets[d] >= 0 && box.sizes[d] >= 0 && box.offsets[d] <= entry.shape[d] &&
             box.sizes[d] <= entry.shape[d] - box.offsets[d];
  }
  if (inside) return;
  throw std::invalid_argument(fmt::format("'{}': tensor {}: the box at [{}] of sizes [{}] is not within shape [{}]",
                                          path, in_quotes(entry.name), fmt::join(box.offsets, ", "),
                                          fmt::join(box.sizes, ", "), fmt::join(entry.shape, ", ")));
}

void check_run(const TensorEntry& entry, int64_t start, int64_t length, const std::string& path) {
  const int64_t elements = entry.nbytes() / static_cast<int64_t>(c10::elementSize(entry.dtype));
  if (start >= 0 && length <= elements && start <= elements - length) return;
  throw std::invalid_argument(fmt::format("'{}': tensor {}: a run of {} elements at {} is not within its {}", path,
                                          in_quotes(entry.name), length, start, elements));
}

// Throws on a bool that is neither 0 nor 1, whose use would be undefined behaviour.
void check_bools(const char* bytes, int64_t count, const TensorEntry& entry, const std::string& path) {
  const auto* const bad = std::find_if(bytes, bytes + count, [](char byte) { return byte != 0 && byte != 1; });
  if (bad == bytes + count) return;
  throw std::invalid_argument(fmt::format("'{}': tensor {}: a BOOL is the byte {}, neither 0 nor 1", path,
                                          in_quotes(entry.name), static_cast<unsigned char>(*bad)));
}

}  // namespace

TensorBox whole_box(const std::vector<int64_t>& shape) { return {std::vector<int64_t>(shape.size(), 0), shape}; }

std::vector<Loop> merged_loops(const std::vector<Loop>& loops) {
  std::vector<Loop> merged;
  for (const Loop& loop : loops) {
    if (loop.size == 1) continue;
    if (!merged.empty() && merged.back().stride == loop.size * loop.stride) {
      merged.back() = {merged.back().size * loop.size, loop.stride};
    } else {
      merged.push_back(loop);
    }
  }
  return merged;
}

ElementRuns runs_of_loops(int64_t offset, const std::vector<Loop>& loops) {
  if (std::ranges::find(loops, 0, &Loop::size) != loops.end()) return {};
  std::vector<Loop> merged = merged_loops(loops);
  ElementRuns runs = {.starts = {offset}, .length = 1};
  if (!merged.empty() && merged.back().stride == 1) {
    runs.length = merged.back().size;
    merged.pop_back();
  }
  for (const Loop& loop : merged) {
    std::vector<int64_t> next;
    next.reserve(runs.starts.size() * static_cast<std::size_t>(loop.size));
    for (const int64_t start : runs.starts) {
      for (int64_t i = 0; i < loop.size; ++i) next.push_back(start + i * loop.stride);
    }
    runs.starts = std::move(next);
  }
  return runs;
}

ElementRuns box_runs(const std::vector<int64_t>& shape, const TensorBox& box) {
  // An empty box may begin behind the tensor's end, where the offset below could overflow.
  if (std::ranges::find(box.sizes, 0) != box.sizes.end()) return {};
  std::vector<Loop> loops(shape.size());
  int64_t offset = 0, stride = 1;
  for (std::size_t d = shape.size(); d-- > 0;) {
    loops[d] = {box.sizes[d], stride};
    offset += box.offsets[d] * stride;
    stride *= shape[d];
  }
  return runs_of_loops(offset, loops);
}

SafetensorsFile::SafetensorsFile(const std::string& path, std::optional<BlockChecksums> checksums)
    : reader_(path, std::move(checksums)) {
  const int64_t file_bytes = reader_.file_bytes();
  if (file_bytes < kLengthBytes) {
    throw std::invalid_argument(
        fmt::format("'{}' has {} bytes, less than the 8 that begin a safetensors file", path, file_bytes));
  }
  std::array<unsigned char, kLengthBytes> prefix = {};
  reader_.read(0, kLengthBytes, prefix.data());
  const int64_t length = header_length(prefix, file_bytes, path);
  std::string json(static_cast<std::size_t>(length), '\0');
  reader_.read(kLengthBytes, length, json.data());
  data_start_ = kLengthBytes + length;
  header_ = parse_safetensors_header(json, file_bytes - data_start_, path);
  reader_.drop_kept();  // a checkpoint has many files open at once
  for (std::size_t i = 0; i < header_.tensors.size(); ++i) by_name_.emplace(header_.tensors[i].name, i);
}

const TensorEntry* SafetensorsFile::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &header_.tensors[found->second];
}

at::Tensor SafetensorsFile::read_box(const TensorEntry& entry, const TensorBox& box, c10::Device device) const {
  check_box(entry, box, path());
  return read_runs(entry, box_runs(entry.shape, box), device).view(box.sizes);
}

void SafetensorsFile::read_bytes(const TensorEntry& entry, const ElementRuns& runs, int64_t position, int64_t count,
                                 char* to) const {
  const auto element = static_cast<int64_t>(c10::elementSize(entry.dtype));
  const int64_t run_bytes = runs.length * element;
  char* at = to;
  for (int64_t left = count; left > 0;) {
    const int64_t start = runs.starts[static_cast<std::size_t>(position / run_bytes)], within = position % run_bytes;
    const int64_t here = std::min(left, run_bytes - within);
    reader_.read(data_start_ + entry.begin + start * element + within, here, at);
    at += here;
    position += here;
    left -= here;
  }
  if (entry.dtype == at::kBool) check_bools(to, count, entry, path());
}

at::Tensor SafetensorsFile::read_runs(const TensorEntry& entry, const ElementRuns& runs, c10::Device device) const {
  const auto numel = static_cast<int64_t>(runs.starts.size()) * runs.length;
  for (const int64_t start : runs.starts) check_run(entry, start, runs.length, path());
  if (!device.is_cpu()) {
    const auto fill = [&](char* to, int64_t position, int64_t count) { read_bytes(entry, runs, position, count, to); };
    return read_to_device(numel * static_cast<int64_t>(c10::elementSize(entry.dtype)), device, fill).view(entry.dtype);
  }
  at::Tensor result = at::empty({numel}, at::TensorOptions().dtype(entry.dtype).device(at::kCPU));
  read_bytes(entry, runs, 0, static_cast<int64_t>(result.nbytes()), static_cast<char*>(result.mutable_data_ptr()));
  return result;
}

std::string SafetensorsFile::fingerprint() const {
  constexpr int64_t kSampled = 64;
  std::string text = fmt::format("{} bytes\n", reader_.file_bytes()) + serialize_safetensors_header(header_);
  for (const TensorEntry& entry : header_.tensors) {
    std::string sample(static_cast<std::size_t>(std::min(kSampled, entry.nbytes())), '\0');
    reader_.read(data_start_ + entry.begin, static_cast<int64_t>(sample.size()), sample.data());
    text += sample;
  }
  return text;
}

}  // namespace tessera
