#include "tessera/dtensor/io/checkpoint_index.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "tessera/dtensor/io/block_reader.h"
#include "tessera/dtensor/io/strict_json.h"

namespace tessera {
namespace {

constexpr std::string_view kExtension = ".safetensors";
constexpr std::string_view kIndexExtension = ".index.json";

// Keeps weight_map, and ignores "metadata", which may hold anything.
class IndexParser final : public StrictJson {
 public:
  using StrictJson::StrictJson;

  WeightMap take() { return std::move(weights_); }
  bool complete() const { return seen_weights_; }

  bool start_object(std::size_t) override {
    if (at_ == At::kStart) {
      at_ = At::kTop;
    } else if (at_ == At::kWeights) {
      at_ = At::kNames;
    } else {
      skip_down("an object");
    }
    return true;
  }

  bool end_object() override {
    if (at_ == At::kNames) {
      at_ = At::kTop;
    } else if (at_ == At::kTop) {
      at_ = At::kEnd;
    } else {
      skip_up("the end of an object");
    }
    return true;
  }

  bool key(std::string& name) override {
    if (at_ == At::kSkipped) return true;
    if (at_ == At::kTop) {
      bool& seen = name == "weight_map" ? seen_weights_ : seen_metadata_;
      if (name != "weight_map" && name != "metadata") refuse("the key " + in_quotes(name));
      if (std::exchange(seen, true)) fail(fmt::format("the key {} appears twice", in_quotes(name)));
      at_ = name == "weight_map" ? At::kWeights : At::kSkipped;
      return true;
    }
    if (at_ != At::kNames) refuse("the key " + in_quotes(name));
    tensor_ = name;
    if (weights_.contains(name)) fail(fmt::format("the tensor {} appears twice", in_quotes(name)));
    at_ = At::kFile;
    return true;
  }

  bool string(std::string& value) override {
    if (at_ == At::kSkipped) return skipped_value();
    if (at_ != At::kFile) refuse("the string " + in_quotes(value));
    if (leads_out_of_folder(value)) {
      fail(fmt::format("tensor {}: {} is not the name of a file in the index's folder", in_quotes(tensor_),
                       in_quotes(value)));
    }
    weights_.emplace(tensor_, value);
    at_ = At::kNames;
    return true;
  }

  bool null() override { return at_ == At::kSkipped ? skipped_value() : StrictJson::null(); }
  bool boolean(bool value) override { return at_ == At::kSkipped ? skipped_value() : StrictJson::boolean(value); }
  bool number_integer(int64_t value) override {
    return at_ == At::kSkipped ? skipped_value() : StrictJson::number_integer(value);
  }
  bool number_unsigned(uint64_t value) override {
    return at_ == At::kSkipped ? skipped_value() : StrictJson::number_unsigned(value);
  }
  bool number_float(double value, const std::string& text) override {
    return at_ == At::kSkipped ? skipped_value() : StrictJson::number_float(value, text);
  }
  bool start_array(std::size_t) override {
    skip_down("an array");
    return true;
  }
  bool end_array() override {
    skip_up("the end of an array");
    return true;
  }

 private:
  enum class At { kStart, kTop, kSkipped, kWeights, kNames, kFile, kEnd };

  std::string where() const override { return "index"; }
  std::string expected() const override {
    switch (at_) {
      case At::kStart: return "an object";
      case At::kTop: return "metadata and weight_map";
      case At::kSkipped: return "a value";
      case At::kWeights: return "an object that gives each tensor its file";
      case At::kNames: return "the name of a tensor";
      case At::kFile: return fmt::format("the file of tensor {}", in_quotes(tensor_));
      case At::kEnd: return "the end of the index";
    }
    return "";
  }

  void skip_down(const char* what) {
    if (at_ != At::kSkipped) refuse(what);
    ++depth_;
  }
  void skip_up(const char* what) {
    if (at_ != At::kSkipped) refuse(what);
    --depth_;
    skipped_value();
  }
  bool skipped_value() {
    if (depth_ == 0) at_ = At::kTop;
    return true;
  }

  At at_ = At::kStart;
  int64_t depth_ = 0;
  bool seen_weights_ = false;
  bool seen_metadata_ = false;
  std::string tensor_;
  WeightMap weights_;
};

std::string stem_of(const std::string& checkpoint_name) {
  if (!checkpoint_name.ends_with(kExtension)) return checkpoint_name;
  return checkpoint_name.substr(0, checkpoint_name.size() - kExtension.size());
}

// Removes the digits at the front of `text`; returns whether there was at least one.
bool take_digits(std::string_view& text) {
  const auto digits = std::ranges::find_if_not(text, [](char c) { return c >= '0' && c <= '9'; }) - text.begin();
  text.remove_prefix(static_cast<std::size_t>(digits));
  return digits > 0;
}

bool take(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

}  // namespace

WeightMap parse_checkpoint_index(std::string_view json, const std::string& file) {
  IndexParser parser(file);
  parser.parse(json);
  if (!parser.complete())
    throw std::invalid_argument(fmt::format("'{}': index: the key 'weight_map' is missing", file));
  return parser.take();
}

WeightMap read_checkpoint_index(const std::string& path, std::optional<BlockChecksums> checksums) {
  return parse_checkpoint_index(read_whole_file(path, kMaxIndexBytes, std::move(checksums)), path);
}

std::string serialize_checkpoint_index(const WeightMap& weights, int64_t total_size, int64_t most_bytes) {
  const nlohmann::json json = {{"metadata", {{"total_size", total_size}}}, {"weight_map", weights}};
  std::string text;
  try {
    text = json.dump(2) + "\n";
  } catch (const nlohmann::json::exception& error) {
    throw std::invalid_argument(fmt::format("saving: a name is not UTF-8 ({})", error.what()));
  }
  if (static_cast<int64_t>(text.size()) <= most_bytes) return text;
  throw std::invalid_argument(
      fmt::format("saving: the index of {} tensors would have {} bytes, and at most {} are read; a larger "
                  "max_shard_bytes makes it no shorter: save fewer tensors, or give them shorter names",
                  weights.size(), text.size(), most_bytes));
}

bool leads_out_of_folder(std::string_view name) {
  return name.empty() || name == "." || name == ".." || name.find('/') != std::string_view::npos ||
         name.find('\0') != std::string_view::npos;
}

std::string index_path(const std::string& checkpoint_path) { return checkpoint_path + std::string(kIndexExtension); }

std::string part_name(const std::string& checkpoint_name, int64_t i, int64_t n, int64_t version) {
  const std::string tag = version == 1 ? "" : fmt::format("-v{}", version);
  return fmt::format("{}{}-{:05}-of-{:05}{}", stem_of(checkpoint_name), tag, i + 1, n, kExtension);
}

bool is_part_name(const std::string& checkpoint_name, const std::string& name) {
  std::string_view rest = name;
  if (!take(rest, stem_of(checkpoint_name))) return false;
  if (take(rest, "-v") && !take_digits(rest)) return false;
  return take(rest, "-") && take_digits(rest) && take(rest, "-of-") && take_digits(rest) && rest == kExtension;
}

int64_t free_version(const std::string& checkpoint_name, int64_t n, const std::set<std::string>& taken) {
  for (int64_t version = 1;; ++version) {
    bool is_free = true;
    for (int64_t i = 0; is_free && i < n; ++i) is_free = !taken.contains(part_name(checkpoint_name, i, n, version));
    if (is_free) return version;
  }
}

}  // namespace tessera
