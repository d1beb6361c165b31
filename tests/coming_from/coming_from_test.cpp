// Checks that every name and parameter of the other libraries has a row on docs/coming-from.md and a test that calls
// it, and that every bug of theirs has a test of its name. names.json lists what the libraries have, calls.json where
// each is called.

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tessera/tests/coming_from/named.h"
#include "tessera/tests/coming_from/source_code.h"
#include "tessera/tests/docs/pages.h"
#include "tessera/tests/ground/source_tree.h"

using namespace tessera::testing;
using nlohmann::json;

namespace {

namespace fs = std::filesystem;
using Complaints = std::vector<std::string>;

Sources sources_below(const fs::path& root) {
  Sources sources;
  for (const fs::path& file : files_below(root / "tests", {".cpp"})) {
    sources["tests/" + file.string()] = read_file(root / "tests" / file);
  }
  return sources;
}

const std::vector<std::string> kBugs = {
    "smoothing_over_the_shard",
    "bias_counted_n_plus_1_times",
    "padding_idx_on_the_wrong_rank",
    "ignored_weight_and_ignore_index",
    "second_backward",
    "one_rank_errors",
    "dropped_remainders",
    "nested_forks",
    "gradients_lost_by_frozen_layers",
};

// A library with one name, its page, and a test.
const json kNames = {{"doc", {{"their_layer", {"bias", "input is cut"}}, {"example: 2 ranks", json::array()}}}};
const json kCalls = {{"tests", {{"layer", {{"file", "tests/a.cpp"}, {"case", "a layer: its bias"}}}}},
                     {"documents",
                      {{"doc",
                        {{"section", "Theirs"},
                         {"calls",
                          {{"their_layer",
                            {{"", {"layer", "our_layer(2)"}},
                             {"bias", {"layer", ".bias = true"}},
                             {"input is cut", {"layer", "cut(x)"}}}},
                           {"example: 2 ranks", {{"", {"layer", "our_layer(2)"}}}}}}}}}}};
const std::string kPage =
    "# Page\n\n## Theirs\n\n| theirs | ours | what differs |\n| --- | --- | --- |\n| `their_layer` | `our_layer` | |\n"
    "| `their_layer`: `bias`; input is cut | `.bias` | more |\n| example: 2 ranks | the same | |\n";
const Sources kSources = {
    {"tests/a.cpp",
     "TESSERA_RANKS_TEST_CASE(\n    \"a layer: its bias\", {1, 2}) {\n  our_layer(2);  // dead_call()\n"
     "  run({.bias =\n           true}, cut(x));\n}\nTEST_CASE(\"nested_forks\") {}\n"}};

Complaints complaints(const json& calls, const std::string& page, const Sources& sources = kSources) {
  return missing_names(kNames, calls, page, sources);
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

const json::json_pointer kOfLayer("/documents/doc/calls/their_layer");

}  // namespace

TEST_CASE("every name and parameter has a row and a test that calls it") {
  const fs::path root = source_root();
  const json names = json::parse(read_file(root / "tests/coming_from/names.json"));
  json calls = json::parse(read_file(root / "tests/coming_from/calls.json"));
  const std::string page = read_file(root / "docs/coming-from.md");
  const Sources sources = sources_below(root);
  for (const std::string& each : missing_names(names, calls, page, sources)) FAIL_CHECK(each);
  std::size_t count = 0, with_parameters = 0;
  for (const json& document : names) {
    count += document.size();
    with_parameters += document.size();
    for (const json& parameters : document) with_parameters += parameters.size();
  }
  CHECK(names.size() == 5);
  CHECK(count == 77);
  // Each name is checked: without rows, and without calls, every one is missing.
  CHECK(missing_names(names, calls, "", sources).size() == with_parameters);
  for (json& document : calls["documents"]) document.erase("calls");
  CHECK(missing_names(names, calls, page, sources).size() == with_parameters);
}

TEST_CASE("every bug that people come from is a test of its name") {
  for (const std::string& each : missing_cases(kBugs, sources_below(source_root()))) FAIL_CHECK(each);
}

TEST_CASE("rows: names, and behind a colon parameters") {
  const NamedRow row = parse_row("| `A`, `B`: `c`, `d = 1: e`, `f(g, h)`; in words | `ours` | x |");
  CHECK(row.names == Complaints{"A", "B"});
  CHECK(row.parameters == Complaints{"c", "d = 1: e", "f(g, h)", "in words"});
  CHECK(row.ours == "`ours`");
  CHECK(parse_row("| example: 2 ranks, 3 groups | it |").names == Complaints{"example: 2 ranks, 3 groups"});
}

TEST_CASE("a page that has it all gives no complaint") { CHECK(complaints(kCalls, kPage).empty()); }

TEST_CASE("what a page does not have is reported") {
  const std::string name = "| `their_layer` | `our_layer` | |\n",
                    parameters = "| `their_layer`: `bias`; input is cut | `.bias` | more |\n";
  CHECK(complaints(kCalls, "") == Complaints{"doc: example: 2 ranks has no row", "doc: their_layer has no row",
                                             "doc: their_layer, bias has no row",
                                             "doc: their_layer, input is cut has no row"});
  CHECK(complaints(kCalls, replaced(replaced(kPage, name, ""), parameters, "")).size() == 3);
  CHECK(complaints(kCalls, replaced(kPage, "`bias`; ", "")) == Complaints{"doc: their_layer, bias has no row"});
  CHECK(complaints(kCalls, replaced(kPage, "; input is cut", "")) ==
        Complaints{"doc: their_layer, input is cut has no row"});
  // A parameter listed under another name does not count, nor does part of a word.
  CHECK(complaints(kCalls, replaced(kPage, "`their_layer`: `bias`", "`other`: `bias`")).size() == 2);
  CHECK(complaints(kCalls, replaced(kPage, "`bias`", "`bias_add`")) == Complaints{"doc: their_layer, bias has no row"});
  CHECK(complaints(kCalls, replaced(kPage, "## Theirs", "## Other")).size() == 4);
  CHECK(complaints(kCalls, replaced(kPage, "| `our_layer` |", "| |")) ==
        Complaints{"doc: their_layer has a row without our side"});
}

TEST_CASE("what no test calls is reported") {
  json calls = kCalls;
  calls[kOfLayer].erase("bias");
  CHECK(complaints(calls, kPage) == Complaints{"doc: their_layer, bias has no call"});
  calls = kCalls;
  calls[kOfLayer][""][1] = "our_layer(3)";
  CHECK(complaints(calls, kPage) ==
        Complaints{"doc: their_layer: \"a layer: its bias\" in tests/a.cpp does not come by `our_layer(3)`"});
  calls[kOfLayer][""][1] = " ";
  CHECK(complaints(calls, kPage).size() == 1);
  calls = kCalls;
  calls["tests"]["layer"]["case"] = "another case";
  CHECK(complaints(calls, kPage).size() == 4);
  CHECK(complaints(kCalls, kPage, {}).size() == 4);
  calls = kCalls;
  calls[kOfLayer][""][0] = "no key";
  CHECK(complaints(calls, kPage).size() == 1);
  CHECK(complaints(json::object(), kPage).size() == 8);  // no rows of a section
}

TEST_CASE("a call counts where the case comes by it: itself, or what it names in its file") {
  const std::string source =
      "#define DEFINED(x) macro(x)\n"
      "namespace {\nconst int kSizes[] = {1'000, 2};\nint used(int x) { return helped(x); }\n"
      "template <class T>\nstruct Held {\n  void run() { held(); }\n};\nint unused() { return other(2); }\n}  // "
      "namespace\n"
      "TESSERA_RANKS_TEST_CASE(\"one \\\"case\\\"\", {1, 2}) {\n  /* in_block(1) */ used(kSizes[0]);//in_line(1)\n"
      "  const char* const text = \"in_quotes(1) // \"; named(\"a\");  // Held\n}\n"
      "TEST_CASE(\"two\") { Held<int> h; in_two(used); }\n";
  const auto comes_by = [&](const std::string& test_case, const std::string& call) {
    return code_of_case(source, test_case).find(bare(call)) != std::string::npos;
  };
  for (const char* const call :
       {"used(kSizes[0])", "helped(x)", "1'000, 2", "named( \"a\" )", "text = \"in_quotes(1) // \""}) {
    CAPTURE(call);
    CHECK(comes_by("one \\\"case\\\"", call));
  }
  for (const char* const call :
       {"in_block(1)", "in_line(1)", "in_quotes(1)", "named(a)", "other(2)", "held()", "in_two(", "macro(x)"}) {
    CAPTURE(call);
    CHECK_FALSE(comes_by("one \\\"case\\\"", call));
  }
  CHECK(comes_by("two", "held()"));
  CHECK(comes_by("two", "helped(x)"));
  CHECK_FALSE(comes_by("two", "other(2)"));
  CHECK(code_of_case(source, "tw").empty());
}

TEST_CASE("calls of what no library has are reported") {
  json calls = kCalls;
  calls[kOfLayer]["scale"] = calls[kOfLayer][""];
  calls["documents"]["doc"]["calls"]["their_loss"] = json::object();
  calls["documents"]["other"] = json::object();
  CHECK(complaints(calls, kPage) ==
        Complaints{"doc: their_layer has no scale", "doc has no their_loss", "there is no document other"});
}

TEST_CASE("test cases are looked for by their whole names") {
  CHECK(missing_cases({"nested_forks"}, kSources).empty());
  CHECK(missing_cases({"nested_fork", "a layer"}, kSources) ==
        Complaints{"nested_fork is no test case", "a layer is no test case"});
}
