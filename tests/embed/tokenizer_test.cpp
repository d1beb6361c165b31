#include "tessera/examples/embed/tokenizer.h"

#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tessera/examples/embed/utf8.h"

namespace embed {
namespace {

using Strings = std::vector<std::string>;
using Ids = std::vector<int64_t>;

const Strings kSmall = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##aff", "##able", "a", "##a", "!"};

const char* environment(const char* name) {
  const char* const value = std::getenv(name);
  if (value == nullptr) FAIL("the environment variable " << name << " is missing; the BUILD file sets it");
  return value;
}

TEST_CASE("basic_tokens: cleans, folds and splits") {
  // clang-format off
  struct Row { std::string why; std::string text; Strings want; };
  const std::vector<Row> rows = {
      {"nothing",                  "",                     {}},
      {"only spaces",              " \t\r\n\xC2\xA0\xE3\x80\x80", {}},
      {"lower case",               "Hello WORLD",          {"hello", "world"}},
      {"ASCII symbols stand alone", "a+b=$5",              {"a", "+", "b", "=", "$", "5"}},
      {"other symbols do not",     "5€ a™",                {"5€", "a™"}},
      {"composed accents",         "Déjà Ünï",             {"deja", "uni"}},
      {"combining accents",        "de\xCC\x81ja\xCC\x80", {"deja"}},
      {"letters that are no accents", "Łódź straße ØÆ",    {"łodz", "straße", "øæ"}},
      {"a Chinese character is a word", "我a们",           {"我", "a", "们"}},
      {"Hangul is taken apart",    "\uAC01",               {"\u1100\u1161\u11A8"}},
      {"controls are removed",     "a\x07" "b\xC2\xAD" "c\xE2\x80\x8B" "d", {"abcd"}},
      {"not UTF-8",                "a\xFF" "b\xC3",        {"ab"}},
  };
  // clang-format on
  for (const Row& row : rows) {
    CAPTURE(row.why);
    CHECK(basic_tokens(row.text) == row.want);
  }
}

TEST_CASE("decode_utf8: one U+FFFD for every byte that is no part of a character") {
  // clang-format off
  struct Row { std::string why; std::string bytes; std::u32string want; };
  const std::vector<Row> rows = {
      {"one to four bytes",  "aé€😀",              U"aé€😀"},
      {"cut off",            "\xE2\x82",           U"\uFFFD\uFFFD"},
      {"a byte of no start", "\x80" "a",           U"\uFFFDa"},
      {"over-long",          "\xC0\xAF",           U"\uFFFD\uFFFD"},
      {"over-long of three", "\xE0\x80\xAF",       U"\uFFFD\uFFFD\uFFFD"},
      {"a surrogate",        "\xED\xA0\x80",       U"\uFFFD\uFFFD\uFFFD"},
      {"above U+10FFFF",     "\xF4\x90\x80\x80",   U"\uFFFD\uFFFD\uFFFD\uFFFD"},
      {"U+FFFD itself",      "\xEF\xBF\xBD",       U"\uFFFD"},
  };
  // clang-format on
  for (const Row& row : rows) {
    CAPTURE(row.why);
    CHECK(decode_utf8(row.bytes) == row.want);
  }
  CHECK(encode_utf8(U"aé€😀") == "aé€😀");
}

TEST_CASE("encode: the longest piece first, [UNK] for a word that cannot be spelled") {
  const Tokenizer tokenizer(kSmall);
  // clang-format off
  struct Row { std::string text; Ids want; };
  const std::vector<Row> rows = {
      {"",           {2, 3}},
      {"unaffable",  {2, 4, 5, 6, 3}},
      {"a!aa",       {2, 7, 9, 7, 8, 3}},
      {"unaffablex", {2, 1, 3}},
      {"x a",        {2, 1, 7, 3}},
  };
  // clang-format on
  for (const Row& row : rows) {
    CAPTURE(row.text);
    CHECK(tokenizer.encode(row.text) == row.want);
  }
}

TEST_CASE("encode: a word of more than 100 characters is [UNK]; a sentence is cut to max_length") {
  const Tokenizer tokenizer(kSmall);
  CHECK(tokenizer.encode(std::string(100, 'a')).size() == 102);
  CHECK(tokenizer.encode(std::string(101, 'a')) == Ids{2, 1, 3});
  CHECK(tokenizer.encode("a a a a", 4) == Ids{2, 7, 7, 3});
  CHECK(tokenizer.encode("a a a a", 2) == Ids{2, 3});
}

TEST_CASE("encode_batch: padded to the longest, with a mask") {
  const Batch batch = Tokenizer(kSmall).encode_batch({"a", "a a !", ""});
  CHECK(batch.sentences == 3);
  CHECK(batch.length == 5);
  CHECK(batch.ids == Ids{2, 7, 3, 0, 0, 2, 7, 7, 9, 3, 2, 3, 0, 0, 0});
  CHECK(batch.mask == Ids{1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0});
}

TEST_CASE("Tokenizer: mistakes are named") {
  CHECK_THROWS_WITH_AS(Tokenizer({"[PAD]", "[UNK]", "[CLS]"}), doctest::Contains("of 3 pieces has no [SEP]"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(Tokenizer({"[PAD]", "x", "x"}),
                       doctest::Contains("'x' occurs twice in the vocabulary, as id 1 and 2"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(Tokenizer::from_file("no/such/vocab.txt"), doctest::Contains("cannot read 'no/such/vocab.txt'"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(Tokenizer(kSmall).encode("a", 1), doctest::Contains("max_length 1 "), std::invalid_argument);
}

TEST_CASE("encode: the ids of the Python tokenizer on BERT's own vocabulary") {
  const Tokenizer tokenizer = Tokenizer::from_file(environment("MINILM_VOCAB"));
  CHECK(tokenizer.vocabulary_size() == 30522);
  const nlohmann::json tokens = nlohmann::json::parse(std::ifstream(environment("EMBED_TOKENS")));
  CHECK(tokens.at("sentences").size() >= 40);
  for (const nlohmann::json& sentence : tokens.at("sentences")) {
    const auto text = sentence.at("text").get<std::string>();
    CAPTURE(text);
    CHECK(tokenizer.encode(text, tokens.at("max_length").get<int64_t>()) == sentence.at("ids").get<Ids>());
  }
}

}  // namespace
}  // namespace embed
