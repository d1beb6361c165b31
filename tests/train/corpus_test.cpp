#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/examples/train/corpus.h"
#include "tessera/examples/train/order2.h"
#include "tessera/tests/train/text_folder.h"
#include "tessera/tools/launcher/private_folder.h"

namespace {

using train::Corpus;
using train::ManifestLine;
using train::Order2Model;
using train::Use;

Corpus read(const std::string& folder) { return train::read_corpus({.path = folder, .parts = {}}); }

void write(const std::string& path, const std::string& text) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path) << text;
}

std::map<std::string, Use> uses_of(const Corpus& corpus) {
  std::map<std::string, Use> out;
  for (const ManifestLine& line : corpus.manifest) out[line.path] = line.use;
  return out;
}

}  // namespace

TEST_CASE("corpus: a stem is the shortest other name that a name begins with, up to an underscore") {
  const std::set<std::string> names = {"add", "add_ops", "add_cpu_dispatch", "address", "_add", "max_pool", "pool"};
  CHECK(train::stem_of("ATen/ops/add.h", names) == "add");
  CHECK(train::stem_of("ATen/ops/add_ops.h", names) == "add");
  CHECK(train::stem_of("add_cpu_dispatch.h", names) == "add");
  CHECK(train::stem_of("address.h", names) == "address");
  CHECK(train::stem_of("_add.h", names) == "_add");
  CHECK(train::stem_of("max_pool.gen.h", names) == "max_pool");
  CHECK(train::stem_of("x/pool.h", names) == train::stem_of("y/pool.cuh", names));
}

TEST_CASE("corpus: the shape of a line has one letter for each word, and no blanks") {
  CHECK(train::shapes_of_lines("int  add(const Tensor& a);\n\n\t \n  // x_1 = 2;\n}") ==
        std::vector<std::string>{"aa(aa&a);", "//a=a;", "}"});
  CHECK(train::shapes_of_lines("") == std::vector<std::string>{});
}

TEST_CASE("corpus: of files made of one template the first is kept, and files of their own are kept") {
  const tessera::PrivateFolder folder;
  const auto from_template = [](const std::string& name) {
    return "#pragma once\nstruct " + name + " {\n  using type = int (*)(" + name + "&);\n  static int call(" + name +
           "& x);\n};\n";
  };
  write(folder.path() + "/ops/abs.h", from_template("abs"));
  write(folder.path() + "/ops/add.h", from_template("add"));
  write(folder.path() + "/ops/mul.h", from_template("mul"));
  write(folder.path() + "/own.h", "int f();\n\nvoid g(int, float) { return f() + 1; }\n// the end\n");
  write(folder.path() + "/twice.h", "x = [1];\ny();\n{z}\nx = [1];\ny();\n{z}\nx = [1];\ny();\n{z}\nx = [1];\ny();\n");
  const auto uses = uses_of(read(folder.path()));
  REQUIRE(uses.size() == 5);
  CHECK(uses.at("ops/abs.h") != Use::kRepetition);
  CHECK(uses.at("ops/add.h") == Use::kRepetition);
  CHECK(uses.at("ops/mul.h") == Use::kRepetition);
  CHECK(uses.at("own.h") != Use::kRepetition);
  CHECK(uses.at("twice.h") == Use::kRepetition);  // it repeats itself
}

TEST_CASE("corpus: files of one stem are on one side, one stem in 32 is held out, and the order is that of the paths") {
  const tessera::PrivateFolder folder;
  for (int i = 0; i < 100; ++i) {
    // Each file has a line of its own shape.
    const std::string name = "f" + std::to_string(i), line = std::string(static_cast<std::size_t>(i), '+') + "\n";
    write(folder.path() + "/a/" + name + ".h", "(" + line);
    write(folder.path() + "/b/" + name + "_ops.h", "[" + line);
  }
  const Corpus corpus = read(folder.path());
  const auto uses = uses_of(corpus);
  REQUIRE(uses.size() == 200);
  int held_out = 0;
  for (int i = 0; i < 100; ++i) {
    const std::string name = "f" + std::to_string(i);
    CHECK(uses.at("a/" + name + ".h") == uses.at("b/" + name + "_ops.h"));
    held_out += uses.at("a/" + name + ".h") == Use::kHeldOut ? 1 : 0;
  }
  CHECK(held_out == 3);
  for (std::size_t i = 1; i < corpus.manifest.size(); ++i) {
    CHECK(corpus.manifest[i - 1].path < corpus.manifest[i].path);
  }
  std::string training;
  for (const ManifestLine& line : corpus.manifest) {
    std::ifstream file(folder.path() + "/" + line.path);
    if (line.use == Use::kTraining) training.append(std::istreambuf_iterator<char>(file), {});
  }
  CHECK(corpus.training == training);
}

TEST_CASE("corpus: the hash tells folders apart by names and by content, and is the same for a copy") {
  const tessera::PrivateFolder folder;
  const std::string one = folder.path() + "/one", two = folder.path() + "/two";
  tessera::testing::write_text_folder(one, 6);
  std::filesystem::copy(one, two);
  const std::string hash = read(one).hash;
  CHECK(hash.size() == 40);
  CHECK(read(two).hash == hash);
  std::ofstream(two + "/file3.txt", std::ios::app) << "more\n";
  CHECK(read(two).hash != hash);
  std::filesystem::copy(one + "/file3.txt", two + "/file3.txt", std::filesystem::copy_options::overwrite_existing);
  CHECK(read(two).hash == hash);
  std::filesystem::rename(two + "/file3.txt", two + "/file9.txt");
  CHECK(read(two).hash != hash);
}

TEST_CASE("corpus: what is no text, and what is hidden, is left out; a folder without two stems is refused") {
  const tessera::PrivateFolder folder;
  tessera::testing::write_text_folder(folder.path() + "/text", 3);
  std::ofstream(folder.path() + "/text/binary") << std::string("a\0b", 3);
  write(folder.path() + "/text/.hidden/a.txt", "x = 1;\n");
  write(folder.path() + "/text/empty", "");
  CHECK(uses_of(read(folder.path() + "/text")).size() == 3);
  write(folder.path() + "/one/a.txt", "x\n");
  CHECK_THROWS_WITH_AS(read(folder.path() + "/one"), doctest::Contains("fewer than two files of text"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(read(folder.path() + "/none"), doctest::Contains("is no folder"), std::invalid_argument);
}

TEST_CASE("corpus: LibTorch's headers are found, and most of ATen/ops is dropped as repetitions") {
  const Corpus corpus = train::read_corpus(train::libtorch_headers());
  CHECK(corpus.manifest.size() > 8000);
  CHECK(corpus.training.size() > 5'000'000);
  CHECK(corpus.held_out.size() > 100'000);
  const auto uses = uses_of(corpus);
  CHECK(uses.contains("c10/core/TensorImpl.h"));
  int kept = 0, dropped = 0;
  for (const ManifestLine& line : corpus.manifest) {
    if (line.path.starts_with("ATen/ops/")) ++(line.use == Use::kRepetition ? dropped : kept);
  }
  CHECK(dropped > 10 * kept);
  CHECK(train::summary_of(corpus).starts_with("data: "));
}

TEST_CASE("order-2 model: probabilities by hand") {
  // The bytes of "abab" are a, b, a, b: two kinds of four. After a comes b twice, after b comes a once; after "ab"
  // comes a once, after "ba" comes b once.
  const Order2Model model("abab");
  const double a = (2 + 2.0 / 256) / 6, b_after_a = (2 + (2 + 2.0 / 256) / 6) / 3, a_after_b = (1 + a) / 2;
  CHECK(model.bits_per_byte("ab") == doctest::Approx(-std::log2(b_after_a)));
  CHECK(model.bits_per_byte("aba") == doctest::Approx(-(std::log2(b_after_a) + std::log2((1 + a_after_b) / 2)) / 2));
  // A byte that was never seen, after bytes that were never seen: two of six parts are for what is new.
  CHECK(model.bits_per_byte("xyz") == doctest::Approx(-std::log2(2.0 / 256 / 6)));
}

TEST_CASE("order-2 model: text of its own kind takes fewer bits than another, and no text is impossible") {
  const tessera::PrivateFolder folder;
  tessera::testing::write_text_folder(folder.path(), 8);
  const Corpus corpus = read(folder.path());
  const Order2Model model(corpus.training);
  const double bits = model.bits_per_byte(corpus.held_out);
  CHECK(bits > 1);
  CHECK(bits < 3);
  CHECK(model.bits_per_byte("\x01\x02\xff\xfe") < 20);
}
