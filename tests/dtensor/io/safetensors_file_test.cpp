#include "tessera/dtensor/io/safetensors_file.h"

#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/io/checkpoint_writer.h"
#include "tessera/tests/dtensor/io/test_files.h"
#include "tessera/tests/harness/skip.h"

namespace tessera {
namespace {

constexpr const char* kPythonFile = "tests/dtensor/io/from_python.safetensors";
constexpr const char* kPython = "../tessera_environment/python";

// Lists the tensors that make_python_file.py writes to its file.
std::vector<std::pair<std::string, at::Tensor>> python_tensors() {
  const at::Tensor base = at::arange(6, at::kFloat).reshape({2, 3});
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  const std::vector<std::pair<std::string, at::ScalarType>> dtypes = {{"u64", at::kUInt64},
                                                                      {"i64", at::kLong},
                                                                      {"f64", at::kDouble},
                                                                      {"c64", at::kComplexFloat},
                                                                      {"f32", at::kFloat},
                                                                      {"u32", at::kUInt32},
                                                                      {"i32", at::kInt},
                                                                      {"bf16", at::kBFloat16},
                                                                      {"f16", at::kHalf},
                                                                      {"u16", at::kUInt16},
                                                                      {"i16", at::kShort},
                                                                      {"f8_e8m0", at::kFloat8_e8m0fnu},
                                                                      {"f8_e4m3", at::kFloat8_e4m3fn},
                                                                      {"f8_e5m2", at::kFloat8_e5m2},
                                                                      {"i8", at::kChar},
                                                                      {"u8", at::kByte},
                                                                      {"bool", at::kBool}};
  for (const auto& [name, dtype] : dtypes) tensors.emplace_back(name, base.to(dtype));
  tensors.emplace_back("scalar", at::scalar_tensor(1.5f, at::kFloat));
  tensors.emplace_back("empty", at::empty({0, 4}, at::kFloat));
  tensors.emplace_back("na\"me\\\n\u00e9", base.to(at::kByte));
  return tensors;
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  const at::Tensor x = a.contiguous();
  const at::Tensor y = b.contiguous();
  return std::string_view(static_cast<const char*>(x.const_data_ptr()), x.nbytes()) ==
         std::string_view(static_cast<const char*>(y.const_data_ptr()), y.nbytes());
}

void save(const std::string& path, const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  std::vector<TensorEntry> entries;
  for (const auto& [name, tensor] : tensors)
    entries.push_back({name, tensor.scalar_type(), tensor.sizes().vec(), 0, 0});
  const std::vector<SafetensorsHeader> plan = plan_checkpoint(entries, 0, {{"format", "pt"}});
  CheckpointWriter writer(path, plan);
  for (const TensorEntry& entry : plan.front().tensors) {
    for (const auto& [name, tensor] : tensors) {
      if (name == entry.name) writer.append(tensor);
    }
  }
  writer.publish();
}

TEST_CASE("safetensors file: a file written by the format's own library is read, every dtype") {
  const SafetensorsFile file(kPythonFile);
  CHECK(file.metadata() == std::map<std::string, std::string>{{"format", "pt"}});
  CHECK(file.tensors().size() == 20);
  for (const auto& row : python_tensors()) {
    CAPTURE(row.first);
    const TensorEntry* entry = file.find(row.first);
    REQUIRE(entry != nullptr);
    CHECK(same_bytes(file.read(*entry), row.second));
  }
  CHECK(file.find("absent") == nullptr);
}

TEST_CASE("safetensors file: what is written equals, byte for byte, what the format's own library writes") {
  const TempFolder folder;
  save(folder / "ours.safetensors", python_tensors());
  CHECK(read_text(folder / "ours.safetensors") == read_text(kPythonFile));
}

TEST_CASE("safetensors file: the format's own library opens what is written") {
  if (!std::filesystem::exists(kPython)) TESSERA_SKIP_MISSING("no Python of tools/setup here; run it with bazel test");
  const TempFolder folder;
  const at::Tensor base = at::arange(6, at::kFloat).reshape({2, 3});
  save(folder / "f", {{"w", base.t()}, {"half", base.to(at::kBFloat16)}, {"empty", at::empty({0, 4}, at::kLong)}});
  write_text(folder / "read.py",
             "import sys, safetensors\n"
             "for name, t in sorted(safetensors.deserialize(open(sys.argv[1], 'rb').read())):\n"
             "    print(name, t['dtype'], t['shape'], bytes(t['data']).hex())\n");
  const std::string command =
      std::string(kPython) + " " + (folder / "read.py") + " " + (folder / "f") + " > " + (folder / "out") + " 2>&1";
  CHECK(std::system(command.c_str()) == 0);
  CHECK(read_text(folder / "out") ==
        "empty I64 [0, 4] \n"
        "half BF16 [2, 3] 0000803f004040408040a040\n"
        "w F32 [3, 2] 00000000000040400000803f00008040000000400000a040\n");
}

TEST_CASE("safetensors file: strides, conjugates and views are saved by their values") {
  const TempFolder folder;
  const at::Tensor base = at::arange(24, at::kFloat).reshape({4, 6});
  const at::Tensor complex = at::complex(base, base.add(1));
  save(folder / "f", {{"t", base.t()},
                      {"narrow", base.narrow(1, 2, 3)},
                      {"conj", complex.conj()},
                      {"imag", at::imag(complex.conj())}});
  const SafetensorsFile file(folder / "f");
  CHECK(file.read(*file.find("t")).equal(base.t()));
  CHECK(file.read(*file.find("narrow")).equal(base.narrow(1, 2, 3)));
  CHECK(file.read(*file.find("conj")).equal(complex.conj()));
  CHECK(file.read(*file.find("imag")).equal(base.add(1).neg()));
}

TEST_CASE("box_runs: contiguous stretches, merged where they touch") {
  struct Row {
    const char* why;
    std::vector<int64_t> shape;
    TensorBox box;
    std::vector<int64_t> starts;
    int64_t length;
  };
  const std::vector<Row> rows = {
      {"whole", {4, 6}, {{0, 0}, {4, 6}}, {0}, 24},
      {"rows", {4, 6}, {{1, 0}, {2, 6}}, {6}, 12},
      {"columns", {4, 6}, {{1, 2}, {2, 3}}, {8, 14}, 3},
      {"middle", {2, 3, 4}, {{0, 1, 0}, {2, 2, 4}}, {4, 16}, 8},
      {"last of three", {2, 2, 4}, {{0, 0, 3}, {2, 2, 1}}, {3, 7, 11, 15}, 1},
      {"sizes of one merge", {3, 1, 4}, {{1, 0, 0}, {2, 1, 4}}, {4}, 8},
      {"scalar", {}, {{}, {}}, {0}, 1},
      {"empty box", {4, 6}, {{4, 0}, {0, 6}}, {}, 0},
      {"empty box far behind its tensor", {0, 1, 1, INT64_MAX}, {{0, 1, 1, INT64_MAX}, {0, 0, 0, 0}}, {}, 0},
      {"empty tensor", {0, 6}, {{0, 0}, {0, 6}}, {}, 0},
  };
  for (const Row& row : rows) {
    CAPTURE(row.why);
    const ElementRuns runs = box_runs(row.shape, row.box);
    CHECK(runs.starts == row.starts);
    CHECK(runs.length == row.length);
  }
}

TEST_CASE("safetensors file: every box of a small tensor equals slicing, and reads its bytes alone") {
  const TempFolder folder;
  const at::Tensor t = at::arange(3 * 4 * 2, at::kShort).reshape({3, 4, 2});
  save(folder / "f", {{"t", t}, {"before", at::ones({5}, at::kLong)}});
  const SafetensorsFile file(folder / "f");
  int boxes = 0;
  for (int64_t i = 0; i <= 3; ++i) {
    for (int64_t ni = 0; ni <= 3 - i; ++ni) {
      for (int64_t j = 0; j <= 4; ++j) {
        for (int64_t nj = 0; nj <= 4 - j; ++nj) {
          for (int64_t k = 0; k <= 2; ++k) {
            for (int64_t nk = 0; nk <= 2 - k; ++nk) {
              const int64_t before = file.bytes_read();
              const at::Tensor got = file.read_box(*file.find("t"), {{i, j, k}, {ni, nj, nk}});
              REQUIRE(got.equal(t.narrow(0, i, ni).narrow(1, j, nj).narrow(2, k, nk)));
              REQUIRE(file.bytes_read() - before == ni * nj * nk * 2);
              ++boxes;
            }
          }
        }
      }
    }
  }
  CHECK(boxes == 10 * 15 * 6);
}

TEST_CASE("safetensors file: a box outside the tensor is refused") {
  const TempFolder folder;
  save(folder / "f", {{"t", at::zeros({3, 4})}});
  const SafetensorsFile file(folder / "f");
  const std::vector<TensorBox> boxes = {{{0}, {3}},
                                        {{0, 0}, {4, 4}},
                                        {{-1, 0}, {1, 4}},
                                        {{1, 0}, {3, 4}},
                                        {{4, 0}, {0, 4}},
                                        {{0, 0}, {-1, 4}},
                                        {{0, INT64_MAX}, {1, INT64_MAX}},
                                        {{0, 0, 0}, {3, 4, 1}}};
  for (const TensorBox& box : boxes) {
    CHECK_THROWS_WITH_AS(file.read_box(*file.find("t"), box), doctest::Contains("tensor 't': the box at ["),
                         std::invalid_argument);
  }
}

TEST_CASE("safetensors file: files that are cut off, foreign or damaged are refused by message") {
  const TempFolder folder;
  const std::string good = read_text(kPythonFile);
  struct Row {
    const char* why;
    std::string bytes;
    const char* want;
  };
  const std::string over_cap("\x01\xe1\xf5\x05\0\0\0\0{}", 10);
  const std::string huge("\xff\xff\xff\xff\xff\xff\xff\xff{}", 10);
  const std::vector<Row> rows = {
      {"empty", "", "has 0 bytes, less than the 8"},
      {"seven bytes", "1234567", "has 7 bytes, less than the 8"},
      {"the length alone", good.substr(0, 8), "but 0 follow; the file is cut off"},
      {"cut in the header", good.substr(0, 100), "but 92 follow; the file is cut off"},
      {"cut in the data", good.substr(0, good.size() - 1),
       "tensor 'bool': data_offsets [352, 358] are not within the 357 bytes"},
      {"cut before the data", good.substr(0, good.size() - 358), "are not within the 0 bytes"},
      {"longer", good + "x", "holds 359 bytes of data, but its tensors (the last is 'bool') end at 358"},
      {"over the cap", over_cap, "the header has 100000001 bytes, more than the format's 100000000"},
      {"length 2^64-1", huge, "the header has 18446744073709551615 bytes, more than"},
      {"a zip file", "PK\x03\x04 some archive of another kind", "more than the format's"},
      {"a header of spaces", safetensors_bytes("   {}", ""), "does not begin with '{'"},
  };
  for (const Row& row : rows) {
    CAPTURE(row.why);
    write_text(folder / "f", row.bytes);
    CHECK_THROWS_WITH_AS(SafetensorsFile(folder / "f"), doctest::Contains(row.want), std::invalid_argument);
    CHECK(message_of([&] { SafetensorsFile(folder / "f"); }).find(folder / "f") != std::string::npos);
  }
}

TEST_CASE("safetensors file: every cut of a good file is refused") {
  const TempFolder folder;
  const std::string good = read_text(kPythonFile);
  for (std::size_t size = 0; size < good.size(); size += 7) {
    write_text(folder / "f", good.substr(0, size));
    REQUIRE_THROWS_AS(SafetensorsFile(folder / "f"), std::invalid_argument);
  }
}

TEST_CASE("safetensors file: opening anything but a regular file throws, and does not wait") {
  const TempFolder folder;
  CHECK_THROWS_WITH_AS(SafetensorsFile(folder / "absent"), doctest::Contains("absent': No such file or directory"),
                       std::runtime_error);
  CHECK_THROWS_WITH_AS(SafetensorsFile(folder.path()), doctest::Contains("is not a regular file"),
                       std::invalid_argument);
  REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
  CHECK_THROWS_WITH_AS(SafetensorsFile(folder / "pipe"), doctest::Contains("is not a regular file"),
                       std::invalid_argument);
}

TEST_CASE("safetensors file: a bool that is neither 0 nor 1 is refused") {
  const TempFolder folder;
  write_text(folder / "f",
             safetensors_bytes(R"({"m":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}})", std::string("\0\1\2", 3)));
  const SafetensorsFile file(folder / "f");
  CHECK_THROWS_WITH_AS(file.read(*file.find("m")), doctest::Contains("tensor 'm': a BOOL is the byte 2"),
                       std::invalid_argument);
  CHECK(file.read_box(*file.find("m"), {{0}, {2}}).numel() == 2);
}

TEST_CASE("safetensors file: one that shrinks after it was opened is an error, not a signal") {
  const TempFolder folder;
  save(folder / "f", {{"t", at::zeros({1000})}});
  const SafetensorsFile file(folder / "f");
  std::filesystem::resize_file(folder / "f", 500);
  CHECK_THROWS_WITH_AS(file.read(*file.find("t")), doctest::Contains("was cut off while it was read"),
                       std::runtime_error);
}

}  // namespace
}  // namespace tessera
