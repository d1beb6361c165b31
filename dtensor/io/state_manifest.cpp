#include "tessera/dtensor/io/state_manifest.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <stdexcept>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tessera/dtensor/io/block_reader.h"
#include "tessera/dtensor/io/checkpoint_index.h"
#include "tessera/dtensor/io/strict_json.h"

namespace tessera {
namespace {

using nlohmann::json;

constexpr int64_t kVersion = 1;
constexpr std::string_view kBeforeChecksum = R"({"crc32": ")";
constexpr std::string_view kBeforeState = R"(", "state": )";
constexpr std::string_view kAfterState = "}\n";
constexpr std::size_t kChecksumDigits = 8;
constexpr std::size_t kStateBegin = kBeforeChecksum.size() + kChecksumDigits + kBeforeState.size();

std::string hex(uint32_t value) { return fmt::format("{:08x}", value); }

// Reads the parts of one manifest. Every error names the file.
class Reader {
 public:
  explicit Reader(const std::string& file) : file_(file) {}

  [[noreturn]] void refuse(const std::string& what) const {
    throw std::invalid_argument(
        fmt::format("'{}': {}; it is torn, damaged or no training state: load another one", file_, what));
  }

  // Returns the text of the state, whose checksum it has verified.
  std::string_view checked_state(std::string_view text) const {
    const bool framed = text.size() >= kStateBegin + kAfterState.size() && text.starts_with(kBeforeChecksum) &&
                        text.ends_with(kAfterState) &&
                        text.substr(kStateBegin - kBeforeState.size(), kBeforeState.size()) == kBeforeState;
    if (!framed) refuse(fmt::format("its {} bytes do not begin and end as those of a manifest", text.size()));
    const std::string_view saved = text.substr(kBeforeChecksum.size(), kChecksumDigits);
    const std::string_view state = text.substr(kStateBegin, text.size() - kStateBegin - kAfterState.size());
    const std::string found = hex(crc32_of(state));
    if (saved != found) refuse(fmt::format("it has the checksum {}, not {} as saved", found, in_quotes(saved)));
    return state;
  }

  const json& member(const json& object, const char* name) const {
    const auto found = object.is_object() ? object.find(name) : object.end();
    if (found == object.end()) refuse(fmt::format("'{}' is missing", name));
    return *found;
  }

  template <typename Integer>
  Integer integer(const json& object, const char* name) const {
    const json& value = member(object, name);
    if (!value.is_number_unsigned() || value.get<uint64_t>() > std::numeric_limits<Integer>::max())
      refuse(fmt::format("'{}' is {}, not a number of its range", name, in_quotes(value.dump())));
    return value.get<Integer>();
  }

  std::map<std::string, std::string> texts(const json& object, const char* name) const {
    const json& values = member(object, name);
    if (!values.is_object()) refuse(fmt::format("'{}' is not an object", name));
    std::map<std::string, std::string> result;
    for (const auto& [key, value] : values.items()) {
      if (!value.is_string()) refuse(fmt::format("{} of '{}' is not text", in_quotes(key), name));
      result.emplace(key, value.get<std::string>());
    }
    return result;
  }

  LossScalerState loss_scaler(const json& object) const {
    const json& scale = member(object, "scale");
    if (!scale.is_number()) refuse(fmt::format("'scale' is {}, not a number", in_quotes(scale.dump())));
    return {.scale = scale.get<double>(), .good_steps = integer<int64_t>(object, "good_steps")};
  }

  BlockChecksums checksums(const json& object) const {
    BlockChecksums result = {.file_bytes = integer<int64_t>(object, "bytes"),
                             .block_bytes = integer<int64_t>(object, "block_bytes"),
                             .crc32 = {}};
    if (result.file_bytes < 0) refuse(fmt::format("a file of {} bytes", result.file_bytes));
    if (result.block_bytes < 1 || result.block_bytes > kLargestBlock)
      refuse(fmt::format("a block of {} bytes is not from 1 to {}", result.block_bytes, kLargestBlock));
    const json& list = member(object, "crc32");
    if (!list.is_array()) refuse("'crc32' is not a list");
    for (const json& item : list) {
      if (!item.is_string()) refuse("a checksum is not text");
      const auto& text = item.get_ref<const std::string&>();
      const bool valid = text.size() == kChecksumDigits && text.find_first_not_of("0123456789abcdef") == text.npos;
      if (!valid) refuse(fmt::format("{} is not a checksum", in_quotes(text)));
      result.crc32.push_back(static_cast<uint32_t>(std::stoul(text, nullptr, 16)));
    }
    const int64_t blocks = block_count(result.file_bytes, result.block_bytes);
    if (static_cast<int64_t>(result.crc32.size()) != blocks)
      refuse(fmt::format("there are {} checksums for {} blocks", result.crc32.size(), blocks));
    return result;
  }

 private:
  const std::string& file_;
};

json json_of(const BlockChecksums& checksums) {
  json list = json::array();
  for (const uint32_t value : checksums.crc32) list.push_back(hex(value));
  return {{"bytes", checksums.file_bytes}, {"block_bytes", checksums.block_bytes}, {"crc32", std::move(list)}};
}

}  // namespace

std::string serialize_state_manifest(const StateManifest& manifest) {
  json files = json::object();
  for (const auto& [name, checksums] : manifest.files) files[name] = json_of(checksums);
  json state = {
      {"format", "tessera training state"},
      {"version", kVersion},
      {"step", manifest.step},
      {"random", {{"seed", manifest.random.seed}, {"counter", manifest.random.counter}}},
      {"scheduler", manifest.scheduler_steps ? json{{"step_count", *manifest.scheduler_steps}} : json(nullptr)},
      {"values", manifest.values},
      {"files", std::move(files)}};
  if (manifest.loss_scaler) {
    state["loss_scaler"] = {{"scale", manifest.loss_scaler->scale}, {"good_steps", manifest.loss_scaler->good_steps}};
  }
  std::string text;
  try {
    text = state.dump();
  } catch (const json::exception& error) {
    throw std::invalid_argument(fmt::format("a value of the training state is not UTF-8: {}", error.what()));
  }
  return fmt::format("{}{}{}{}{}", kBeforeChecksum, hex(crc32_of(text)), kBeforeState, text, kAfterState);
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): the copy is changed
int64_t bytes_with_checksums(StateManifest manifest) {
  constexpr int64_t kEach = kChecksumDigits + 3;  // with its quotes and a comma, which the last one does not have
  int64_t bytes = 0;
  for (auto& [name, checksums] : manifest.files) {
    checksums.crc32.clear();
    // More than these are too many in any case, and the product of all blocks might overflow.
    const int64_t blocks = std::min(block_count(checksums.file_bytes, checksums.block_bytes), kMaxManifestBytes);
    bytes += std::max<int64_t>(0, blocks * kEach - 1);
  }
  return bytes + static_cast<int64_t>(serialize_state_manifest(manifest).size());
}

StateManifest parse_state_manifest(std::string_view text, const std::string& file) {
  const Reader reader(file);
  const json state = parse_unique_json(reader.checked_state(text), kMaxManifestBytes, file, "state");
  if (reader.member(state, "format") != "tessera training state") reader.refuse("its format is another one");
  const auto version = reader.integer<int64_t>(state, "version");
  if (version != kVersion) {
    throw OtherVersion(
        fmt::format("'{}': its version is {}, and this program reads version {}; load it with a Tessera that reads it, "
                    "or move its folder away to load an older state",
                    file, version, kVersion));
  }
  StateManifest manifest;
  manifest.step = reader.integer<int64_t>(state, "step");
  const json& random = reader.member(state, "random");
  manifest.random = {.seed = reader.integer<uint64_t>(random, "seed"),
                     .counter = reader.integer<uint64_t>(random, "counter")};
  const json& scheduler = reader.member(state, "scheduler");
  if (!scheduler.is_null()) manifest.scheduler_steps = reader.integer<uint32_t>(scheduler, "step_count");
  if (state.contains("loss_scaler")) manifest.loss_scaler = reader.loss_scaler(state["loss_scaler"]);
  manifest.values = reader.texts(state, "values");
  const json& files = reader.member(state, "files");
  if (!files.is_object()) reader.refuse("'files' is not an object");
  for (const auto& [name, checksums] : files.items()) {
    if (leads_out_of_folder(name))
      reader.refuse(fmt::format("{} is not the name of a file in its folder", in_quotes(name)));
    manifest.files.emplace(name, reader.checksums(checksums));
  }
  return manifest;
}

std::string read_state_manifest(const std::string& folder) {
  return read_whole_file((std::filesystem::path(folder) / kManifestName).string(), kMaxManifestBytes);
}

}  // namespace tessera
