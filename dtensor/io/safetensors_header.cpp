#include "tessera/dtensor/io/safetensors_header.h"

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "tessera/dtensor/io/strict_json.h"

namespace tessera {
namespace {

using c10::ScalarType;

constexpr std::size_t kMaxTensorDims = 64;
constexpr std::size_t kAlignment = 8;

struct DtypeName {
  ScalarType dtype;
  std::string_view name;
};

// Lists the dtypes in the order in which lay_out_tensors places them.
constexpr std::array<DtypeName, 17> kDtypes = {{
    {ScalarType::UInt64, "U64"},
    {ScalarType::Long, "I64"},
    {ScalarType::Double, "F64"},
    {ScalarType::ComplexFloat, "C64"},
    {ScalarType::Float, "F32"},
    {ScalarType::UInt32, "U32"},
    {ScalarType::Int, "I32"},
    {ScalarType::BFloat16, "BF16"},
    {ScalarType::Half, "F16"},
    {ScalarType::UInt16, "U16"},
    {ScalarType::Short, "I16"},
    {ScalarType::Float8_e8m0fnu, "F8_E8M0"},
    {ScalarType::Float8_e4m3fn, "F8_E4M3"},
    {ScalarType::Float8_e5m2, "F8_E5M2"},
    {ScalarType::Char, "I8"},
    {ScalarType::Byte, "U8"},
    {ScalarType::Bool, "BOOL"},
}};

std::string dtype_names() {
  std::string names;
  for (std::size_t i = 0; i < kDtypes.size(); ++i) names += fmt::format("{}{}", i == 0 ? "" : ", ", kDtypes[i].name);
  return names;
}

std::optional<ScalarType> dtype_from_name(std::string_view name) {
  for (const DtypeName& known : kDtypes) {
    if (known.name == name) return known.dtype;
  }
  return std::nullopt;
}

auto find_dtype(ScalarType dtype) { return std::ranges::find(kDtypes, dtype, &DtypeName::dtype); }

// Reads {"__metadata__": {string: string}, name: {"dtype": string, "shape": [..], "data_offsets": [begin, end]}}.
class HeaderParser final : public StrictJson {
 public:
  using StrictJson::StrictJson;

  SafetensorsHeader take() { return std::move(header_); }

  bool start_object(std::size_t) override {
    switch (at_) {
      case At::kStart: at_ = At::kTop; return true;
      case At::kTensor: at_ = At::kFields; return true;
      case At::kMetadata: at_ = At::kMetadataKeys; return true;
      default: refuse("an object");
    }
  }

  bool key(std::string& name) override {
    switch (at_) {
      case At::kTop: return top_key(name);
      case At::kFields: return field_key(name);
      case At::kMetadataKeys: return metadata_key(name);
      default: refuse("the key " + in_quotes(name));
    }
  }

  bool string(std::string& value) override {
    if (at_ == At::kMetadataValue) {
      header_.metadata[metadata_key_] = value;
      at_ = At::kMetadataKeys;
      return true;
    }
    if (at_ != At::kDtype) refuse("the string " + in_quotes(value));
    const std::optional<ScalarType> dtype = dtype_from_name(value);
    if (!dtype) fail(fmt::format("the dtype {} is not supported; supported are {}", in_quotes(value), dtype_names()));
    dtype_ = dtype;
    at_ = At::kFields;
    return true;
  }

  bool start_array(std::size_t) override {
    if (at_ == At::kShape) {
      at_ = At::kShapeNumbers;
    } else if (at_ == At::kOffsets) {
      at_ = At::kOffsetNumbers;
    } else {
      refuse("an array");
    }
    return true;
  }

  bool number_unsigned(uint64_t value) override {
    if (at_ != At::kShapeNumbers && at_ != At::kOffsetNumbers) refuse("the number " + std::to_string(value));
    if (value > static_cast<uint64_t>(INT64_MAX)) fail(fmt::format("the number {} is too large", value));
    const bool is_shape = at_ == At::kShapeNumbers;
    std::vector<int64_t>& numbers = is_shape ? *shape_ : *offsets_;
    if (is_shape && numbers.size() == kMaxTensorDims) fail(fmt::format("more than {} dimensions", kMaxTensorDims));
    if (!is_shape && numbers.size() == 2) fail("data_offsets has more than two numbers");
    numbers.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool end_array() override {
    if (at_ == At::kOffsetNumbers && offsets_->size() != 2) {
      fail(fmt::format("data_offsets has {} numbers, not 2", offsets_->size()));
    }
    at_ = At::kFields;
    return true;
  }

  bool end_object() override {
    switch (at_) {
      case At::kFields: end_tensor(); break;
      case At::kMetadataKeys: at_ = At::kTop; break;
      case At::kTop: at_ = At::kEnd; break;
      default: refuse("the end of an object");
    }
    return true;
  }

 private:
  enum class At {
    kStart,
    kTop,
    kTensor,
    kFields,
    kDtype,
    kShape,
    kShapeNumbers,
    kOffsets,
    kOffsetNumbers,
    kMetadata,
    kMetadataKeys,
    kMetadataValue,
    kEnd
  };

  std::string where() const override {
    switch (at_) {
      case At::kStart:
      case At::kTop:
      case At::kEnd: return "header";
      case At::kMetadata:
      case At::kMetadataKeys:
      case At::kMetadataValue: return "__metadata__";
      case At::kTensor:
      case At::kFields: return fmt::format("tensor {}", in_quotes(name_));
      case At::kDtype: return fmt::format("tensor {}: dtype", in_quotes(name_));
      case At::kShape:
      case At::kShapeNumbers: return fmt::format("tensor {}: shape", in_quotes(name_));
      case At::kOffsets:
      case At::kOffsetNumbers: return fmt::format("tensor {}: data_offsets", in_quotes(name_));
    }
    return "header";
  }

  std::string expected() const override {
    switch (at_) {
      case At::kStart: return "an object of tensors";
      case At::kTop: return "the name of a tensor";
      case At::kTensor: return "an object with dtype, shape and data_offsets";
      case At::kFields: return "dtype, shape and data_offsets";
      case At::kDtype: return "the name of a dtype";
      case At::kShape:
      case At::kShapeNumbers: return "a list of sizes (integers from 0)";
      case At::kOffsets:
      case At::kOffsetNumbers: return "a list of two offsets (integers from 0)";
      case At::kMetadata: return "an object of strings";
      case At::kMetadataKeys: return "a key";
      case At::kMetadataValue: return "a string";
      case At::kEnd: return "the end of the header";
    }
    return "";
  }

  bool top_key(const std::string& name) {
    if (!names_.insert(name).second) fail(fmt::format("the key {} appears twice", in_quotes(name)));
    if (name == "__metadata__") {
      at_ = At::kMetadata;
      return true;
    }
    name_ = name;
    dtype_.reset();
    shape_.reset();
    offsets_.reset();
    at_ = At::kTensor;
    return true;
  }

  bool field_key(const std::string& name) {
    if (name == "dtype") {
      if (dtype_) fail("the key 'dtype' appears twice");
      at_ = At::kDtype;
    } else if (name == "shape") {
      if (shape_) fail("the key 'shape' appears twice");
      shape_.emplace();
      at_ = At::kShape;
    } else if (name == "data_offsets") {
      if (offsets_) fail("the key 'data_offsets' appears twice");
      offsets_.emplace();
      at_ = At::kOffsets;
    } else {
      refuse("the key " + in_quotes(name));
    }
    return true;
  }

  bool metadata_key(const std::string& name) {
    if (header_.metadata.contains(name)) fail(fmt::format("the key {} appears twice", in_quotes(name)));
    metadata_key_ = name;
    at_ = At::kMetadataValue;
    return true;
  }

  void end_tensor() {
    if (!dtype_) fail("the key 'dtype' is missing");
    if (!shape_) fail("the key 'shape' is missing");
    if (!offsets_) fail("the key 'data_offsets' is missing");
    header_.tensors.push_back({name_, *dtype_, std::move(*shape_), (*offsets_)[0], (*offsets_)[1]});
    at_ = At::kTop;
  }

  At at_ = At::kStart;
  SafetensorsHeader header_;
  std::set<std::string> names_;
  std::string name_;
  std::optional<ScalarType> dtype_;
  std::optional<std::vector<int64_t>> shape_;
  std::optional<std::vector<int64_t>> offsets_;
  std::string metadata_key_;
};

void check_dtype(const TensorEntry& entry) {
  if (find_dtype(entry.dtype) != kDtypes.end()) return;
  throw std::invalid_argument(
      fmt::format("saving tensor {}: safetensors has no dtype for {}; convert the tensor to one of {}",
                  in_quotes(entry.name), c10::toString(entry.dtype), dtype_names()));
}

void check_size(const TensorEntry& entry, int64_t data_bytes, const std::string& what) {
  if (entry.begin > entry.end || entry.end > data_bytes) {
    throw std::invalid_argument(
        fmt::format("{}: data_offsets [{}, {}] are not within the {} bytes of data that the file "
                    "holds; it is cut off or damaged",
                    what, entry.begin, entry.end, data_bytes));
  }
  const int64_t want = checked_nbytes(entry.shape, entry.dtype, what);
  if (entry.nbytes() != want) {
    throw std::invalid_argument(fmt::format("{}: data_offsets [{}, {}] hold {} bytes, but shape [{}] of {} takes {}",
                                            what, entry.begin, entry.end, entry.nbytes(), fmt::join(entry.shape, ", "),
                                            safetensors_dtype_name(entry.dtype), want));
  }
}

// Checks that `tensors`, sorted by offset, tile [0, data_bytes).
void check_coverage(const std::vector<TensorEntry>& tensors, int64_t data_bytes, const std::string& file) {
  int64_t at = 0;
  for (const TensorEntry& entry : tensors) {
    if (entry.begin != at) {
      throw std::invalid_argument(fmt::format(
          "'{}': tensor {}: data_offsets begin at {}, {} the data before it, which ends "
          "at {}",
          file, in_quotes(entry.name), entry.begin, entry.begin < at ? "overlapping" : "leaving a hole after", at));
    }
    at = entry.end;
  }
  if (at == data_bytes) return;
  throw std::invalid_argument(
      fmt::format("'{}': the file holds {} bytes of data, but its tensors{} end at {}", file, data_bytes,
                  tensors.empty() ? "" : fmt::format(" (the last is {})", in_quotes(tensors.back().name)), at));
}

}  // namespace

std::string_view safetensors_dtype_name(ScalarType dtype) {
  const auto found = find_dtype(dtype);
  return found == kDtypes.end() ? c10::toString(dtype) : found->name;
}

int64_t checked_nbytes(const std::vector<int64_t>& shape, ScalarType dtype, const std::string& what) {
  int64_t bytes = static_cast<int64_t>(c10::elementSize(dtype));
  bool is_empty = false;
  for (const int64_t size : shape) {
    is_empty = is_empty || size == 0;
    if (size < 0 || __builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) {
      throw std::invalid_argument(fmt::format("{}: the size of shape [{}] of {} overflows", what,
                                              fmt::join(shape, ", "), safetensors_dtype_name(dtype)));
    }
  }
  return is_empty ? 0 : bytes;
}

SafetensorsHeader parse_safetensors_header(std::string_view json, int64_t data_bytes, const std::string& file) {
  if (json.empty() || json.front() != '{') {
    throw std::invalid_argument(fmt::format("'{}': the header does not begin with '{{'; not a safetensors file", file));
  }
  HeaderParser parser(file);
  parser.parse(json);
  SafetensorsHeader header = parser.take();
  for (const TensorEntry& entry : header.tensors) {
    check_size(entry, data_bytes, fmt::format("'{}': tensor {}", file, in_quotes(entry.name)));
  }
  std::ranges::stable_sort(header.tensors, [](const TensorEntry& a, const TensorEntry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  check_coverage(header.tensors, data_bytes, file);
  return header;
}

std::vector<TensorEntry> lay_out_tensors(std::vector<TensorEntry> tensors) {
  for (const TensorEntry& entry : tensors) check_dtype(entry);
  std::ranges::sort(tensors, [](const TensorEntry& a, const TensorEntry& b) {
    return std::pair(find_dtype(a.dtype), std::string_view(a.name)) <
           std::pair(find_dtype(b.dtype), std::string_view(b.name));
  });
  std::set<std::string_view> names = {"__metadata__"};
  int64_t at = 0;
  for (TensorEntry& entry : tensors) {
    const std::string what = fmt::format("saving tensor {}", in_quotes(entry.name));
    if (!names.insert(entry.name).second) {
      throw std::invalid_argument(what + ": the name is reserved or was given twice; names must be different");
    }
    entry.begin = at;
    if (__builtin_add_overflow(at, checked_nbytes(entry.shape, entry.dtype, what), &at)) {
      throw std::invalid_argument(what + ": the size of the file overflows");
    }
    entry.end = at;
  }
  return tensors;
}

std::string serialize_safetensors_header(const SafetensorsHeader& header) {
  std::string text = "{";
  const auto append = [&text](const std::string& key, const nlohmann::ordered_json& value) {
    text += fmt::format("{}{}:{}", text.size() > 1 ? "," : "", nlohmann::json(key).dump(), value.dump());
  };
  try {
    if (!header.metadata.empty()) append("__metadata__", header.metadata);
    for (const TensorEntry& entry : header.tensors) {
      append(entry.name, {{"dtype", safetensors_dtype_name(entry.dtype)},
                          {"shape", entry.shape},
                          {"data_offsets", {entry.begin, entry.end}}});
    }
  } catch (const nlohmann::json::exception& error) {
    throw std::invalid_argument(fmt::format("saving: a name or metadata is not UTF-8 ({})", error.what()));
  }
  text += '}';
  text.append((kAlignment - text.size() % kAlignment) % kAlignment, ' ');
  if (static_cast<int64_t>(text.size()) > kMaxHeaderBytes) {
    throw std::invalid_argument(
        fmt::format("saving: a header of {} bytes is longer than the format's {}; save into several "
                    "files (max_shard_bytes)",
                    text.size(), kMaxHeaderBytes));
  }
  std::string length(8, '\0');
  for (std::size_t i = 0; i < length.size(); ++i) length[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
  return length + text;
}

}  // namespace tessera
