// Gives thousands of changed files to the reader of safetensors files and to the format's own library, and requires
// that both accept the same ones, with the same contents. Where this reader is stricter, read_with_python.py has a rule
// by which such files are known, and the reason.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "tessera/dtensor/io/safetensors_file.h"
#include "tessera/dtensor/io/strict_json.h"
#include "tessera/tests/dtensor/io/test_files.h"
#include "tessera/tests/fuzz/subjects.h"
#include "tessera/tests/harness/skip.h"

namespace tessera {
namespace {

using nlohmann::json;

constexpr const char* kPython = "../tessera_environment/python";
constexpr const char* kScript = "tests/fuzz/read_with_python.py";
constexpr uint64_t kComposedHeaders = 3000, kChangedHeaders = 3000, kChangedFiles = 1000;

// Makes a file of a subject's input, whose first byte says how many bytes of data follow the header.
std::string file_of(std::string_view input) {
  const std::size_t data_bytes = input.empty() ? 0 : static_cast<unsigned char>(input[0]);
  return safetensors_bytes(std::string(input.substr(input.empty() ? 0 : 1)), distinct_bytes(data_bytes));
}

std::string tensor(std::string_view fields) { return fmt::format(R"({{"a":{{{}}}}})", fields); }

// Holds a file whose fate is known. `classes` names those of read_with_python.py, for a file that only this reader
// refuses.
struct Example {
  std::string header;
  std::size_t data_bytes;
  bool in_python;
  std::vector<std::string> classes;
};

std::vector<Example> examples() {
  const std::string two = R"("dtype":"U8","shape":[2],"data_offsets":[0,2])", a = tensor(two);
  const std::string ones(R"(1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1)");
  return {
      {a, 2, true, {}},
      {a + " \n\r\t", 2, true, {}},
      {"{}", 0, true, {}},
      {R"({"":{)" + two + R"(},"\u0000/\ud83d\ude00":{"dtype":"F64","shape":[0],"data_offsets":[2,2]}})", 2, true, {}},
      {tensor(R"("dtype":"BOOL","shape":[1],"data_offsets":[0,1])"), 1, true, {}},
      {tensor(R"("dtype":"BOOL","shape":[3],"data_offsets":[0,3])"), 3, true, {}},
      {tensor(R"("dtype":"U8","shape":[0,9223372036854775807],"data_offsets":[0,0])"), 0, true, {}},
      {tensor(R"("dtype":"U8","shape":[2,)" + ones + "," + ones.substr(2) + R"(],"data_offsets":[0,2])"), 2, true, {}},
      {a + std::string(1, '\0'), 2, false, {}},
      {a + std::string("\0 anything", 10), 2, false, {}},
      {"\xef\xbb\xbf" + a, 2, false, {}},
      {a + "/**/", 2, false, {}},
      {a, 3, false, {}},
      {a, 1, false, {}},
      {tensor(R"("dtype":"U8","shape":[-0],"data_offsets":[0,0])"), 0, false, {}},
      {tensor(R"("dtype":"C128","shape":[1],"data_offsets":[0,16])"), 16, false, {}},
      {R"({"__metadata__":{"k":1}})", 0, false, {}},
      {"", 0, false, {}},
      {"\n" + a, 2, true, {"begins with white space"}},
      {R"({"a":{)" + two + R"(},"\u0061":{)" + two + "}}", 2, true, {"a name twice"}},
      {R"({"__metadata__":{"k":"1","k":"2"}})", 0, true, {"a name twice"}},
      {R"({"__metadata__":null})", 0, true, {"null for metadata"}},
      {tensor(two + R"(,"strides":[1])"), 2, true, {"another field"}},
      {R"({"a":["U8",[2],[0,2]]})", 2, true, {"a list for an object"}},
      {tensor(R"("dtype":{"U8":null},"shape":[2],"data_offsets":[0,2])"), 2, true, {"a list for an object"}},
      {tensor(R"("dtype":"F4","shape":[4],"data_offsets":[0,2])"), 2, true, {"another dtype"}},
      {tensor(R"("dtype":"F8_E5M2FNUZ","shape":[2],"data_offsets":[0,2])"), 2, true, {"another dtype"}},
      {tensor(R"("dtype":"U8","shape":[2,)" + ones + "," + ones + R"(],"data_offsets":[0,2])"),
       2,
       true,
       {"more than 64 dimensions"}},
      {tensor(R"("dtype":"U8","shape":[0,9223372036854775808],"data_offsets":[0,0])"), 0, true, {"numbers too large"}},
      {tensor(R"("dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0])"),
       0,
       true,
       {"numbers too large"}},
      {tensor(R"("dtype":"I64","shape":[1152921504606846976,0],"data_offsets":[0,0])"), 0, true, {"numbers too large"}},
  };
}

// Composes headers of parts that readers may judge differently. Most are well-formed, and their data fits.
class Composer {
 public:
  explicit Composer(uint64_t seed) : random_(seed) {}

  // Returns a subject's input: the number of bytes of data, and the header.
  std::string input() {
    std::string members;
    for (std::size_t count = 1 + below(3); count > 0; --count) append(members, member());
    if (below(2) == 0) append(members, R"("__metadata__":)" + one_of(kMetadata));
    const std::string header = (below(16) == 0 ? "\n{" : "{") + members + "}" + (below(8) == 0 ? " \n\t" : "");
    return std::string(1, static_cast<char>(begin_)) + header;
  }

 private:
  struct Shape {
    std::string text;
    int64_t elements;
  };
  inline static const std::vector<std::string> kMetadata = {
      "{}", R"({"k":"1"})", R"({"k":"1", "l":"\u00e9\\"})", "null", R"({"k":"1","k":"2"})", R"({"k":1})", R"({"":""})"};
  inline static const std::vector<std::string> kNames = {"a",       "b", "c", "d e", "\\u0061", "", "__metadata__ ",
                                                         "\xc3\xa9"};
  inline static const std::vector<std::pair<std::string, int64_t>> kDtypes = {
      {"U8", 1}, {"F32", 4}, {"I64", 8}, {"BF16", 2}, {"BOOL", 1}, {"C64", 8}, {"F8_E4M3FNUZ", 1}, {"f32", 4}};
  inline static const std::vector<Shape> kShapes = {{"", 1},
                                                    {"1", 1},
                                                    {"2,3", 6},
                                                    {" 1 , 2", 2},
                                                    {"3,1,1,1", 3},
                                                    {"0", 0},
                                                    {"0,7", 0},
                                                    {"0,9223372036854775807", 0},
                                                    {"4611686018427387904,0", 0},
                                                    {"0,18446744073709551615", 0},
                                                    {"18446744073709551616,0", 0},
                                                    {"02", 2},
                                                    {"2.0", 2},
                                                    {"-0", 0}};

  std::size_t below(std::size_t count) { return static_cast<std::size_t>(random_() % count); }
  template <typename T>
  const T& one_of(const std::vector<T>& choices) {
    return choices[below(choices.size())];
  }
  void append(std::string& list, const std::string& item) {
    list += (list.empty() ? "" : below(8) == 0 ? " ,\r\n" : ",") + item;
  }

  std::string member() {
    const auto& [dtype, bytes] = one_of(kDtypes);
    // The first shapes are the usual ones.
    const Shape& shape = kShapes[below(below(2) == 0 ? 7 : kShapes.size())];
    const int64_t end = begin_ + shape.elements * bytes + (below(24) == 0 ? 1 : 0);
    std::vector<std::string> fields = {fmt::format(R"("dtype":"{}")", dtype),
                                       fmt::format(R"("shape":[{}])", shape.text),
                                       fmt::format(R"("data_offsets" : [{}, {}])", begin_, end)};
    std::shuffle(fields.begin(), fields.end(), random_);
    if (below(16) == 0) fields.push_back(R"("strides":[[1], {}])");
    if (below(32) == 0) fields.push_back(fields[below(3)]);
    if (below(32) == 0) fields.pop_back();
    begin_ = end;
    return fmt::format(R"("{}":{{{}}})", one_of(kNames), fmt::join(fields, ","));
  }

  std::mt19937_64 random_;
  int64_t begin_ = 0;
};

std::vector<std::string> all_files() {
  std::vector<std::string> files;
  for (const Example& each : examples())
    files.push_back(safetensors_bytes(each.header, distinct_bytes(each.data_bytes)));
  std::vector<std::string> headers = fuzz::subject("safetensors_header").seeds;
  headers.push_back(std::string(1, '\x0e') +
                    R"({"x.y\n\u00e9":{"dtype":"U8","shape":[2,3],"data_offsets":[8,14]}, "w":)"
                    R"( {"data_offsets":[0,8],"shape":[1,2],"dtype":"F32"},)"
                    R"("__metadata__":{"format":"pt","k":"\ud83d\ude00\u0000"}})");
  headers.push_back(std::string(1, '\x06') +
                    R"({"__metadata__":{"description":"a text in which changes do no harm, as in a name", "k":"v"},)"
                    R"(        "a.name.of.many.letters.in.which.changes.do.no.harm":)"
                    R"({"dtype":"U8","shape":[6],"data_offsets":[0,6]}      }              )");
  headers.push_back(std::string(1, '\x01') + R"({"m":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]}})");
  for (uint64_t seed = 0; seed < kComposedHeaders; ++seed) files.push_back(file_of(Composer(seed).input()));
  for (uint64_t seed = 0; seed < kChangedHeaders; ++seed) files.push_back(file_of(fuzz::mutated(headers, seed)));
  std::vector<std::string> whole;
  for (const std::string& header : headers) whole.push_back(file_of(header));
  for (uint64_t seed = 0; seed < kChangedFiles; ++seed) files.push_back(fuzz::mutated(whole, seed));
  return files;
}

std::string hexadecimal(const at::Tensor& tensor) {
  const auto* bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
  return fmt::format("{:02x}", fmt::join(bytes, bytes + tensor.nbytes(), ""));
}

// Returns what the script prints of a file, without the classes; "accepted" alone where this reader refuses the file.
json outcome_here(const std::string& path) {
  try {
    const SafetensorsFile file(path);
    json tensors = json::object();
    for (const TensorEntry& entry : file.tensors()) {
      std::string data;
      try {
        data = hexadecimal(file.read(entry));
      } catch (const std::invalid_argument&) {
        data = "no bools";
      }
      tensors[entry.name] = json::array({safetensors_dtype_name(entry.dtype), entry.shape, data});
    }
    return {{"accepted", true}, {"metadata", file.metadata()}, {"tensors", tensors}};
  } catch (const std::invalid_argument& error) {
    return {{"accepted", false}, {"error", error.what()}};
  }
}

struct Outcomes {
  std::vector<std::string> files;
  std::vector<json> here, in_python;
};

// Returns how both readers judge all_files(); examples() come first. One process of Python reads them all.
Outcomes read_all() {
  Outcomes all = {.files = all_files(), .here = {}, .in_python = {}};
  const TempFolder folder;
  for (std::size_t i = 0; i < all.files.size(); ++i) {
    write_text(folder / std::to_string(i), all.files[i]);
    all.here.push_back(outcome_here(folder / std::to_string(i)));
  }
  const std::string command =
      fmt::format("{} {} {} {} > {}", kPython, kScript, folder.path(), all.files.size(), folder / "out");
  if (std::system(command.c_str()) != 0) throw std::runtime_error(command + " has failed");
  std::istringstream lines(read_text(folder / "out"));
  for (std::string line; std::getline(lines, line);) all.in_python.push_back(json::parse(line));
  if (all.in_python.size() != all.files.size()) throw std::runtime_error(command + " has left out files");
  return all;
}

const Outcomes& outcomes() {
  static const Outcomes all = read_all();
  return all;
}

bool is_accepted(const json& outcome) { return outcome.at("accepted").get<bool>(); }

// Returns the classes of stricter refusals to which a file belongs that Python accepts.
std::vector<std::string> classes_of(const json& in_python) {
  return in_python.value("stricter", std::vector<std::string>());
}

std::string shown(const Outcomes& all, std::size_t i) {
  // A message of an error may hold bytes of the file that are not UTF-8.
  const auto text = [](const json& outcome) { return outcome.dump(-1, ' ', false, json::error_handler_t::replace); };
  return fmt::format("file {}: {}\n  here:      {}\n  in Python: {}", i, in_quotes(all.files[i]), text(all.here[i]),
                     text(all.in_python[i]));
}

}  // namespace

TEST_CASE("files whose fate is known are accepted and refused as expected, and each class of refusals has one") {
  if (!std::filesystem::exists(kPython)) TESSERA_SKIP_MISSING("no Python of tools/setup here; run it with bazel test");
  const std::vector<Example> known = examples();
  for (std::size_t i = 0; i < known.size(); ++i) {
    const std::string text = shown(outcomes(), i);
    CAPTURE(text);
    const json &here = outcomes().here[i], &in_python = outcomes().in_python[i];
    CHECK(is_accepted(in_python) == known[i].in_python);
    CHECK(is_accepted(here) == (known[i].in_python && known[i].classes.empty()));
    CHECK((classes_of(in_python) == known[i].classes));
  }
}

TEST_CASE("changed files are accepted where Python's safetensors accepts them, except in the classes with a reason") {
  if (!std::filesystem::exists(kPython)) TESSERA_SKIP_MISSING("no Python of tools/setup here; run it with bazel test");
  const Outcomes& all = outcomes();
  int accepted = 0, refused = 0;
  std::map<std::string, int> stricter;
  for (std::size_t i = 0; i < all.files.size(); ++i) {
    const json &here = all.here[i], &in_python = all.in_python[i];
    const std::vector<std::string> classes = classes_of(in_python);
    if (!classes.empty()) ++stricter[classes.front()];
    ++(is_accepted(here) ? accepted : refused);
    if (is_accepted(here) != (is_accepted(in_python) && classes.empty())) {
      FAIL_CHECK(shown(all, i));
    } else if (is_accepted(here)) {
      const bool same = here["tensors"] == in_python["tensors"] && here["metadata"] == in_python["metadata"];
      if (!same) FAIL_CHECK(fmt::format("the contents differ: {}", shown(all, i)));
    }
  }
  // Most composed headers are well-formed. Changes of names, metadata and padding are no errors; most others are.
  CHECK(accepted > 500);
  CHECK(refused > 4000);
  CHECK(stricter.size() == 8);
  MESSAGE(fmt::format("{} files were accepted by both, {} were refused; of these by this reader alone: {}", accepted,
                      refused, stricter));
}

}  // namespace tessera
