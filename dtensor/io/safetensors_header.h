#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>

namespace tessera {

// Describes one tensor of a safetensors file: row-major, little-endian, in bytes [begin, end) of the data that follows
// the header.
struct TensorEntry {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> shape;
  int64_t begin = 0;
  int64_t end = 0;

  int64_t nbytes() const { return end - begin; }
  friend bool operator==(const TensorEntry&, const TensorEntry&) = default;
};

// Describes the header of a safetensors file.
//
// Invariants of a parsed header:
//   - Names are different.
//   - The tensors, sorted by offset, tile [0, data_bytes()) without gap or overlap.
//   - end - begin is the number of elements times the size of one.
struct SafetensorsHeader {
  std::map<std::string, std::string> metadata;
  std::vector<TensorEntry> tensors;

  int64_t data_bytes() const { return tensors.empty() ? 0 : tensors.back().end; }
  friend bool operator==(const SafetensorsHeader&, const SafetensorsHeader&) = default;
};

// Limits the length of the header, as the format does.
inline constexpr int64_t kMaxHeaderBytes = 100'000'000;

// Parses the JSON of a header whose file holds `data_bytes` bytes after it. `file` is for messages only. Throws
// std::invalid_argument, which names the file and the tensor, on anything that breaks the format or an invariant above,
// also on duplicate keys, unknown keys, sizes that overflow and dtypes that LibTorch does not have. Source: the
// format's description at github.com/huggingface/safetensors (README.md).
SafetensorsHeader parse_safetensors_header(std::string_view json, int64_t data_bytes, const std::string& file);

// Gives each tensor its place in the data: larger elements first, then by name. So every tensor is aligned to its
// elements, and the order depends on nothing else. The format's own library writes the same order. Throws
// std::invalid_argument on a repeated or reserved name, a dtype that the format does not have, and sizes that overflow.
std::vector<TensorEntry> lay_out_tensors(std::vector<TensorEntry> tensors);

// Returns the bytes before the data: the length in 8 bytes, the JSON, and spaces up to a multiple of 8. Throws
// std::invalid_argument when the JSON is longer than kMaxHeaderBytes, or a name is not UTF-8.
std::string serialize_safetensors_header(const SafetensorsHeader& header);

// Returns "BF16" for kBFloat16 and so on; LibTorch's own name for a dtype that the format does not have.
std::string_view safetensors_dtype_name(c10::ScalarType dtype);

// Returns the number of elements times the bytes of one; shape must not be negative. Throws std::invalid_argument that
// starts with `what` where the product overflows, in which a size of 0 counts as 1: an empty tensor has strides too.
int64_t checked_nbytes(const std::vector<int64_t>& shape, c10::ScalarType dtype, const std::string& what);

}  // namespace tessera
