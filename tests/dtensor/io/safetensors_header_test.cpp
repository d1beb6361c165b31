#include "tessera/dtensor/io/safetensors_header.h"

#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/tests/dtensor/io/test_files.h"

namespace tessera {
namespace {

std::string refusal(const std::string& json, int64_t data_bytes) {
  return message_of([&] { parse_safetensors_header(json, data_bytes, "f"); });
}

std::string tensor(const std::string& fields) { return R"({"w":{)" + fields + "}}"; }

TEST_CASE("safetensors header: everything that the format allows is read") {
  const SafetensorsHeader header = parse_safetensors_header(
      R"({"__metadata__":{"format":"pt"},"b":{"shape":[2,3],"dtype":"F32","data_offsets":[2,26]},)"
      R"("a":{"dtype":"BF16","shape":[],"data_offsets":[0,2]},"e":{"dtype":"I64","shape":[0,7],"data_offsets":[2,2]}}   )",
      26, "f");
  CHECK(header.metadata == std::map<std::string, std::string>{{"format", "pt"}});
  const std::vector<TensorEntry> want = {{"a", c10::ScalarType::BFloat16, {}, 0, 2},
                                         {"e", c10::ScalarType::Long, {0, 7}, 2, 2},
                                         {"b", c10::ScalarType::Float, {2, 3}, 2, 26}};
  CHECK((header.tensors == want));
  CHECK(parse_safetensors_header("{}", 0, "f").tensors.empty());
}

TEST_CASE("safetensors header: everything else is refused, and the message names the tensor") {
  struct Row {
    const char* why;
    std::string json;
    int64_t data_bytes;
    const char* want;
  };
  const std::string ok = R"("dtype":"F32","shape":[2],"data_offsets":[0,8])";
  const std::vector<Row> rows = {
      {"empty header", "", 0, "the header does not begin with '{'"},
      {"an array", "[]", 0, "the header does not begin with '{'"},
      {"a byte order mark", "\xEF\xBB\xBF{}", 0, "the header does not begin with '{'"},
      {"cut off", R"({"w":{"dtype":"F32","sha)", 8, "tensor 'w': not valid JSON at byte 25"},
      {"text after the object", "{}{}", 0, "header: not valid JSON at byte 3"},
      {"a zero byte and anything after it", std::string("{}\0[", 4), 0,
       "header: not valid JSON at byte 3, a zero byte"},
      {"padding with zero bytes", std::string("{}\0\0", 4), 0, "header: not valid JSON at byte 3, a zero byte"},
      {"not UTF-8", "{\"\xff\":1}", 0, "header: not valid JSON at byte 3"},
      {"a tensor twice", R"({"w":{)" + ok + R"(},"w":{)" + ok + "}}", 8, "the key 'w' appears twice"},
      {"metadata twice", R"({"__metadata__":{},"__metadata__":{}})", 0, "the key '__metadata__' appears twice"},
      {"a metadata key twice", R"({"__metadata__":{"a":"1","a":"2"}})", 0, "__metadata__: the key 'a' appears twice"},
      {"metadata of numbers", R"({"__metadata__":{"a":1}})", 0, "__metadata__: expected a string, found the number 1"},
      {"metadata that is a list", R"({"__metadata__":[]})", 0,
       "__metadata__: expected an object of strings, found an array"},
      {"dtype twice", tensor(R"("dtype":"F32","dtype":"F32")"), 0, "tensor 'w': the key 'dtype' appears twice"},
      {"shape twice", tensor(R"("shape":[1],"shape":[2])"), 0, "tensor 'w': the key 'shape' appears twice"},
      {"data_offsets twice", tensor(R"("data_offsets":[0,8],"data_offsets":[0,8])"), 8,
       "tensor 'w': the key 'data_offsets' appears twice"},
      {"an unknown key", tensor(ok + R"(,"strides":[1])"), 8,
       "tensor 'w': expected dtype, shape and data_offsets, found the key 'strides'"},
      {"no dtype", tensor(R"("shape":[2],"data_offsets":[0,8])"), 8, "tensor 'w': the key 'dtype' is missing"},
      {"no shape", tensor(R"("dtype":"F32","data_offsets":[0,8])"), 8, "tensor 'w': the key 'shape' is missing"},
      {"no offsets", tensor(R"("dtype":"F32","shape":[2])"), 8, "tensor 'w': the key 'data_offsets' is missing"},
      {"an unknown dtype", tensor(R"("dtype":"F4","shape":[2],"data_offsets":[0,1])"), 1,
       "tensor 'w': dtype: the dtype 'F4' is not supported; supported are U64, I64"},
      {"a dtype in small letters", tensor(R"("dtype":"f32","shape":[2],"data_offsets":[0,8])"), 8,
       "the dtype 'f32' is not supported"},
      {"a dtype that is a number", tensor(R"("dtype":7)"), 0,
       "tensor 'w': dtype: expected the name of a dtype, found the number 7"},
      {"a tensor that is a string", R"({"w":"F32"})", 0,
       "tensor 'w': expected an object with dtype, shape and data_offsets"},
      {"a tensor that is null", R"({"w":null})", 0,
       "tensor 'w': expected an object with dtype, shape and data_offsets, found null"},
      {"a shape that is a number", tensor(R"("dtype":"F32","shape":2)"), 0,
       "tensor 'w': shape: expected a list of sizes"},
      {"a nested shape", tensor(R"("shape":[[2]])"), 0,
       "tensor 'w': shape: expected a list of sizes (integers from 0), found an array"},
      {"a negative size", tensor(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"), 8,
       "tensor 'w': shape: expected a list of sizes (integers from 0), found the negative number -2"},
      {"a size of minus zero", tensor(R"("shape":[-0])"), 0, "tensor 'w': shape: expected a list of sizes"},
      {"a fractional size", tensor(R"("shape":[2.0])"), 0,
       "tensor 'w': shape: expected a list of sizes (integers from 0), found the number 2.0"},
      {"a boolean size", tensor(R"("shape":[true])"), 0, "found a boolean"},
      {"a size of 2^63", tensor(R"("shape":[9223372036854775808])"), 0,
       "tensor 'w': shape: the number 9223372036854775808 is too large"},
      {"a size of 2^64", tensor(R"("shape":[18446744073709551616])"), 0, "tensor 'w': shape: expected a list of sizes"},
      {"too many dimensions",
       tensor(R"("shape":[)" +
              [] {
                std::string s = "1";
                for (int i = 0; i < 64; ++i) s += ",1";
                return s;
              }() +
              "]"),
       0, "tensor 'w': shape: more than 64 dimensions"},
      {"one offset", tensor(R"("data_offsets":[0])"), 0, "tensor 'w': data_offsets: data_offsets has 1 numbers, not 2"},
      {"three offsets", tensor(R"("data_offsets":[0,8,9])"), 0,
       "tensor 'w': data_offsets: data_offsets has more than two numbers"},
      {"the product overflows to 0", tensor(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0])"), 0,
       "'f': tensor 'w': the size of shape [4294967296, 4294967296] of F32 overflows"},
      {"the bytes overflow", tensor(R"("dtype":"F64","shape":[1152921504606846976],"data_offsets":[0,0])"), 0,
       "of F64 overflows"},
      {"overflow hidden by a zero", tensor(R"("dtype":"F32","shape":[4294967296,4294967296,0],"data_offsets":[0,0])"),
       0, "overflows"},
      {"overflow after a zero", tensor(R"("dtype":"F32","shape":[0,4294967296,4294967296],"data_offsets":[0,0])"), 0,
       "overflows"},
      {"end before begin", tensor(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"), 8,
       "tensor 'w': data_offsets [8, 0] are not within the 8 bytes"},
      {"past the end of the file", tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])"), 7,
       "tensor 'w': data_offsets [0, 8] are not within the 7 bytes of data that the file holds; it is cut off"},
      {"offsets near 2^63",
       tensor(R"("dtype":"F32","shape":[2],"data_offsets":[9223372036854775799,9223372036854775807])"), 8,
       "are not within the 8 bytes"},
      {"fewer bytes than the shape", tensor(R"("dtype":"F32","shape":[3],"data_offsets":[0,8])"), 8,
       "tensor 'w': data_offsets [0, 8] hold 8 bytes, but shape [3] of F32 takes 12"},
      {"more bytes than the shape", tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,8])"), 8,
       "hold 8 bytes, but shape [1] of F32 takes 4"},
      {"overlap",
       R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[8],"data_offsets":[4,12]}})",
       12, "tensor 'b': data_offsets begin at 4, overlapping the data before it, which ends at 8"},
      {"the same place",
       R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})",
       8, "tensor 'b': data_offsets begin at 0, overlapping"},
      {"a hole",
       R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[8,12]}})",
       12, "tensor 'b': data_offsets begin at 8, leaving a hole after the data before it, which ends at 4"},
      {"a hole at the start", tensor(R"("dtype":"U8","shape":[4],"data_offsets":[4,8])"), 8,
       "tensor 'w': data_offsets begin at 4, leaving a hole"},
      {"data left over", tensor(ok), 9, "the file holds 9 bytes of data, but its tensors (the last is 'w') end at 8"},
      {"data without tensors", "{}", 1, "the file holds 1 bytes of data, but its tensors end at 0"},
      {"an endless name", R"({")" + std::string(5000, 'x') + R"(":1})", 0, "xxx...' (5000 bytes)"},
      {"deep nesting", R"({"w":{"shape":)" + std::string(100000, '['), 0,
       "tensor 'w': shape: expected a list of sizes"},
  };
  for (const Row& row : rows) {
    CAPTURE(row.why);
    const std::string text = refusal(row.json, row.data_bytes);
    CAPTURE(text);
    CHECK(text.starts_with("'f': "));
    CHECK(text.find(row.want) != std::string::npos);
    CHECK_THROWS_AS(parse_safetensors_header(row.json, row.data_bytes, "f"), std::invalid_argument);
  }
}

TEST_CASE("safetensors header: laid out by size of element, then name; written as the JSON says") {
  const std::vector<TensorEntry> tensors = lay_out_tensors({{"b", c10::ScalarType::Half, {3}, 0, 0},
                                                            {"z", c10::ScalarType::Double, {2}, 0, 0},
                                                            {"a", c10::ScalarType::Half, {}, 0, 0},
                                                            {"m", c10::ScalarType::Bool, {0}, 0, 0}});
  const SafetensorsHeader header = {{{"k", "v\n"}}, tensors};
  const std::string want = R"({"__metadata__":{"k":"v\n"},"z":{"dtype":"F64","shape":[2],"data_offsets":[0,16]},)"
                           R"("a":{"dtype":"F16","shape":[],"data_offsets":[16,18]},)"
                           R"("b":{"dtype":"F16","shape":[3],"data_offsets":[18,24]},)"
                           R"("m":{"dtype":"BOOL","shape":[0],"data_offsets":[24,24]}})";
  const std::string bytes = serialize_safetensors_header(header);
  CHECK(bytes.size() % 8 == 0);
  CHECK(bytes.substr(8, want.size()) == want);
  CHECK(bytes.find_first_not_of(' ', 8 + want.size()) == std::string::npos);
  CHECK(parse_safetensors_header(bytes.substr(8), 24, "f") == header);
}

TEST_CASE("safetensors header: what cannot be written is refused by name") {
  const auto lay_out = [](std::vector<TensorEntry> tensors) { return message_of([&] { lay_out_tensors(tensors); }); };
  CHECK(lay_out({{"a", c10::ScalarType::Float, {1}, 0, 0}, {"a", c10::ScalarType::Half, {1}, 0, 0}})
            .find("tensor 'a': the name is reserved or was given twice") != std::string::npos);
  CHECK(lay_out({{"__metadata__", c10::ScalarType::Float, {1}, 0, 0}}).find("is reserved") != std::string::npos);
  CHECK(lay_out({{"a", c10::ScalarType::ComplexDouble, {1}, 0, 0}})
            .find("no dtype for ComplexDouble; convert the tensor to one of U64") != std::string::npos);
  CHECK(lay_out({{"a", c10::ScalarType::Float, {INT64_MAX}, 0, 0}}).find("overflows") != std::string::npos);
  CHECK(lay_out({{"a", c10::ScalarType::Byte, {INT64_MAX}, 0, 0}, {"b", c10::ScalarType::Byte, {INT64_MAX}, 0, 0}})
            .find("tensor 'b': the size of the file overflows") != std::string::npos);
  CHECK(message_of([] {
          serialize_safetensors_header({{}, {{"\xff", c10::ScalarType::Float, {}, 0, 4}}});
        }).find("not UTF-8") != std::string::npos);
}

// Makes one random change of a text: a byte, a cut, a repeated or removed stretch, or a number replaced by an extreme
// one.
std::string mutate(std::string text, std::mt19937& random) {
  const auto below = [&](std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random); };
  static const std::vector<std::string> kPieces = {"0",
                                                   "-1",
                                                   "18446744073709551615",
                                                   "9223372036854775807",
                                                   "4611686018427387904",
                                                   "{",
                                                   "}",
                                                   "[",
                                                   "]",
                                                   ",",
                                                   ":",
                                                   "\"",
                                                   "null",
                                                   "1e9",
                                                   "\"shape\":",
                                                   "\"w\":",
                                                   "\\u0000"};
  const std::size_t at = below(text.size());
  switch (below(5)) {
    case 0: text[at] = static_cast<char>(below(256)); break;
    case 1: text.resize(at); break;
    case 2: text.insert(at, text.substr(below(text.size()), below(40))); break;
    case 3: text.erase(at, below(20)); break;
    default: text.insert(at, kPieces[below(kPieces.size())]); break;
  }
  return text.empty() ? "{" : text;
}

TEST_CASE(
    "safetensors header: a damaged header is read as something that tiles the data, or refused by the right "
    "exception") {
  std::mt19937 random(20261120);
  const std::string seed = serialize_safetensors_header({{{"format", "pt"}},
                                                         lay_out_tensors({{"w", c10::ScalarType::Float, {4, 3}, 0, 0},
                                                                          {"b", c10::ScalarType::Half, {5}, 0, 0},
                                                                          {"m", c10::ScalarType::Bool, {2, 2}, 0, 0},
                                                                          {"s", c10::ScalarType::Long, {}, 0, 0}})})
                               .substr(8);
  const int64_t data_bytes = 48 + 10 + 4 + 8;
  int read = 0;
  for (int i = 0; i < 40000; ++i) {
    std::string json = seed;
    for (int changes = std::uniform_int_distribution<int>(1, 4)(random); changes > 0; --changes)
      json = mutate(json, random);
    try {
      const SafetensorsHeader header = parse_safetensors_header(json, data_bytes, "f");
      ++read;
      int64_t at = 0;
      for (const TensorEntry& entry : header.tensors) {
        REQUIRE(entry.begin == at);
        REQUIRE(checked_nbytes(entry.shape, entry.dtype, "w") == entry.nbytes());
        at = entry.end;
      }
      REQUIRE(at == data_bytes);
    } catch (const std::invalid_argument&) {
    }
  }
  CHECK(read > 100);  // changes of names, metadata and padding are no errors
  CHECK(read < 20000);
}

}  // namespace
}  // namespace tessera
