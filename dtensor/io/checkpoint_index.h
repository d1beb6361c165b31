#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "tessera/dtensor/io/block_checksums.h"

namespace tessera {

// Says which file of a sharded checkpoint holds each tensor, as "model.safetensors.index.json" does. Files are plain
// names in the index's own folder.
using WeightMap = std::map<std::string, std::string>;

// Are the names of a checkpoint in a folder: that of weights, and that of an optimizer's state.
inline constexpr const char* kWeightsName = "model.safetensors";
inline constexpr const char* kOptimizerName = "optimizer.safetensors";

// Is the length of the longest index that is read and written, in bytes: more than a million tensors need.
inline constexpr int64_t kMaxIndexBytes = int64_t{256} << 20;

// Parses {"metadata": {...}, "weight_map": {tensor: file}}. `file` is for messages only. Throws std::invalid_argument
// on anything else, on duplicate keys, and on file names that lead out of the folder.
WeightMap parse_checkpoint_index(std::string_view json, const std::string& file);
// Reads and parses an index of at most kMaxIndexBytes, and verifies it where there are checksums (see BlockReader).
// Throws also std::runtime_error, when the system cannot read it.
WeightMap read_checkpoint_index(const std::string& path, std::optional<BlockChecksums> checksums = std::nullopt);

// Returns the text of an index; `total_size` is in bytes. Throws std::invalid_argument when the text is longer than
// `most_bytes`, or a name is not UTF-8.
std::string serialize_checkpoint_index(const WeightMap& weights, int64_t total_size,
                                       int64_t most_bytes = kMaxIndexBytes);

// Says whether a name from a file, which may be hostile, is not that of a file in the same folder.
bool leads_out_of_folder(std::string_view name);

// Returns the index's path: "model.safetensors" -> "model.safetensors.index.json".
std::string index_path(const std::string& checkpoint_path);

// Returns the file name of part `i` (from 0) of `n` of a checkpoint: "model-00002-of-00003.safetensors" for i = 1, n =
// 3 of "model.safetensors", or "model-v2-00002-of-00003.safetensors" for version 2.
std::string part_name(const std::string& checkpoint_name, int64_t i, int64_t n, int64_t version);
// Says whether `name` is a name that part_name gives.
bool is_part_name(const std::string& checkpoint_name, const std::string& name);
// Returns the lowest version whose parts' names are all outside `taken`.
int64_t free_version(const std::string& checkpoint_name, int64_t n, const std::set<std::string>& taken);

}  // namespace tessera
