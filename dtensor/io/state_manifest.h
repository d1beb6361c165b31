#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "tessera/dtensor/io/block_checksums.h"
#include "tessera/dtensor/loss_scaler_state.h"
#include "tessera/mesh/world.h"

namespace tessera {

// Is the file of a training state that describes the others.
inline constexpr const char* kManifestName = "state.json";
// Is the length of the longest one that is read and written, in bytes.
inline constexpr int64_t kMaxManifestBytes = int64_t{1} << 30;

// Holds what state.json says: everything of a training state but the tensors, and the checksums of the other files.
struct StateManifest {
  int64_t step = 0;
  RandomState random;
  std::optional<int64_t> scheduler_steps;      // nullopt: no scheduler was saved
  std::optional<LossScalerState> loss_scaler;  // nullopt: none was saved
  std::map<std::string, std::string> values;
  FileChecksums files;
};

// Says that a state is of a version that this program does not read. It is not damaged, so no older state is to be
// taken in its place.
class OtherVersion : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Returns {"crc32": "0123abcd", "state": {...}} in one line, where crc32 is of the text of the second value. Equal
// manifests give equal texts. Throws std::invalid_argument on a value that is not UTF-8.
std::string serialize_state_manifest(const StateManifest& manifest);

// Returns the length of the text of `manifest` once its `files` have all of their checksums: those that are there do
// not count. Throws as serialize_state_manifest.
int64_t bytes_with_checksums(StateManifest manifest);

// Parses such a text, of which `file` is the name in messages. Throws std::invalid_argument when the checksum differs,
// an object has a key twice, a part is missing or of another type, or the name of a file leads out of the folder;
// OtherVersion when the version is another one.
StateManifest parse_state_manifest(std::string_view text, const std::string& file);

// Returns the text of `folder`/state.json, of at most kMaxManifestBytes, which is not parsed. Throws as BlockReader.
std::string read_state_manifest(const std::string& folder);

}  // namespace tessera
