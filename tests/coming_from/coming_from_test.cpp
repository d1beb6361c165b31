// Runs the program that tests every name of the other libraries, and checks by its report that assertions ran in each
// name's case and in each parameter's subcase; also that docs/coming-from.md has a row for each.

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tessera/tests/coming_from/named.h"
#include "tessera/tests/docs/pages.h"
#include "tessera/tests/ground/source_tree.h"
#include "tessera/tests/harness/assertion_counts.h"
#include "tessera/tests/harness/shell.h"
#include "tessera/tools/launcher/private_folder.h"

using namespace tessera::testing;
using nlohmann::json;

namespace {

namespace fs = std::filesystem;
using Complaints = std::vector<std::string>;

// The bugs of the other libraries that people come from.
const Cases kBugs = {
    {"smoothing_over_the_shard", {}},
    {"bias_counted_n_plus_1_times", {}},
    {"padding_idx_on_the_wrong_rank", {}},
    {"ignored_weight_and_ignore_index", {}},
    {"second_backward", {}},
    {"dropped_remainders", {}},
    {"gradients_lost_by_frozen_layers", {}},
    {"nested_forks", {}},
};
// One more is in a program of its own, whose ranks are threads.
const std::string kBugOfThreads = "one_rank_errors";

// Defects that the layers had here.
const Complaints kUses = {"in torch::nn::Sequential and AnyModule", "printed", "cloned"};
const Complaints kTables = {"dim = None", "dim = 0", "dim = 1"};
const Cases kDefects = {
    {"ColumnParallelLinear as a module", kUses},
    {"RowParallelLinear as a module", kUses},
    {"ParallelEmbedding as a module", kUses},
    {"ParallelLinear, the loss and RegisterParallelDim as modules", kUses},
    {"head->weight = table->weight: they train as in one process", kTables},
    {"parallel_embedding_layer takes the caller's init_method, and its own where there is none", kTables},
};

json documents() { return json::parse(read_file(source_root() / "tests/coming_from/names.json")); }

std::size_t count_of(const Cases& cases) {
  std::size_t count = cases.size();
  for (const auto& [name, subcases] : cases) count += subcases.size();
  return count;
}

// Holds how the program of the names ended, and the assertions that ran if it came to its end.
struct NamesRun {
  int exit_code = 0;
  std::optional<AssertionCounts> counts;
};

// Runs the program once, and shows its output, whose counts add to this test's.
const NamesRun& names_run() {
  static const NamesRun run = [] {
    const tessera::PrivateFolder folder;
    const fs::path report = fs::path(folder.path()) / "report";
    const ShellOutcome outcome =
        shell("TESSERA_TEST_REPORT='" + report.string() + "' timeout 3000 tests/coming_from/names 2>&1");
    std::printf("%s\n", outcome.output.c_str());
    NamesRun of_names{.exit_code = outcome.exit_code, .counts = std::nullopt};
    if (fs::exists(report)) of_names.counts = parse_counts(read_file(report));
    return of_names;
  }();
  return run;
}

const AssertionCounts& counts_of_names() {
  CHECK(names_run().exit_code == 0);
  REQUIRE(names_run().counts.has_value());
  return *names_run().counts;
}

void check_ran(const Cases& cases) {
  for (const std::string& each : without_assertions(cases, counts_of_names())) FAIL_CHECK(each);
  CHECK(without_assertions(cases, {}).size() == count_of(cases));  // each is looked for
}

// A library with one name, its page, and what ran.
const json kDocuments = {
    {"001_doc",
     {{"section", "Theirs"},
      {"names", {{"their_layer", {"bias", "input is cut"}}, {"example: 2 ranks", json::array()}}}}}};
const std::string kPage =
    "# Page\n\n## Theirs\n\n| theirs | ours | what differs |\n| --- | --- | --- |\n| `their_layer` | `our_layer` | |\n"
    "| `their_layer`: `bias`; input is cut | `.bias` | more |\n| example: 2 ranks | the same | |\n";
const AssertionCounts kCounts = {
    {{"example: 2 ranks"}, 1}, {{"their_layer", "bias"}, 2}, {{"their_layer", "input is cut", "along the rows"}, 1}};

Complaints complaints(const std::string& page) { return missing_rows(kDocuments, page); }

Complaints not_run(const AssertionCounts& counts) { return without_assertions(cases_of(kDocuments), counts); }

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

}  // namespace

TEST_CASE("every name has a test case of its name, and every parameter a subcase, in which assertions ran") {
  const Cases cases = cases_of(documents());
  CHECK(cases.size() == 77);
  CHECK(count_of(cases) == 77 + 245);
  check_ran(cases);
}

TEST_CASE("every name and parameter has a row") {
  const json names = documents();
  CHECK(names.size() == 5);
  for (const std::string& each : missing_rows(names, read_file(source_root() / "docs/coming-from.md")))
    FAIL_CHECK(each);
  CHECK(missing_rows(names, "").size() == count_of(cases_of(names)));  // each is looked for
}

TEST_CASE("every bug that people come from is a test of its name") {
  check_ran(kBugs);
  const ShellOutcome listed = shell("tests/coming_from/one_rank_errors_test --list-test-cases");
  const Complaints lines = lines_of(listed.output);
  CHECK(std::ranges::count(lines, kBugOfThreads) == 1);
}

TEST_CASE("every defect that a layer had here is a test of its name") { check_ran(kDefects); }

TEST_CASE("rows: names, and behind a colon parameters") {
  const NamedRow row = parse_row("| `A`, `B`: `c`, `d = 1: e`, `f(g, h)`; in words | `ours` | x |");
  CHECK(row.names == Complaints{"A", "B"});
  CHECK(row.parameters == Complaints{"c", "d = 1: e", "f(g, h)", "in words"});
  CHECK(row.ours == "`ours`");
  CHECK(parse_row("| example: 2 ranks, 3 groups | it |").names == Complaints{"example: 2 ranks, 3 groups"});
}

TEST_CASE("a page and a report that have it all give no complaint") {
  CHECK(complaints(kPage).empty());
  CHECK(not_run(kCounts).empty());
}

TEST_CASE("what a page does not have is reported") {
  const std::string name = "| `their_layer` | `our_layer` | |\n",
                    parameters = "| `their_layer`: `bias`; input is cut | `.bias` | more |\n";
  CHECK(complaints("") == Complaints{"001_doc: example: 2 ranks has no row", "001_doc: their_layer has no row",
                                     "001_doc: their_layer, bias has no row",
                                     "001_doc: their_layer, input is cut has no row"});
  CHECK(complaints(replaced(replaced(kPage, name, ""), parameters, "")).size() == 3);
  CHECK(complaints(replaced(kPage, "`bias`; ", "")) == Complaints{"001_doc: their_layer, bias has no row"});
  CHECK(complaints(replaced(kPage, "; input is cut", "")) ==
        Complaints{"001_doc: their_layer, input is cut has no row"});
  // A parameter listed under another name does not count, nor does part of a word.
  CHECK(complaints(replaced(kPage, "`their_layer`: `bias`", "`other`: `bias`")).size() == 2);
  CHECK(complaints(replaced(kPage, "`bias`", "`bias_add`")) == Complaints{"001_doc: their_layer, bias has no row"});
  CHECK(complaints(replaced(kPage, "## Theirs", "## Other")).size() == 4);
  CHECK(complaints(replaced(kPage, "| `our_layer` |", "| |")) ==
        Complaints{"001_doc: their_layer has a row without our side"});
}

TEST_CASE("a case or a subcase without an assertion is reported") {
  const auto without = [](const AssertionPlace& place) {
    AssertionCounts counts = kCounts;
    REQUIRE(counts.erase(place) == 1);
    return counts;
  };
  const std::string no_bias = "no assertion ran in the subcase \"bias\" of \"their_layer\"";
  CHECK(not_run(without({"example: 2 ranks"})) == Complaints{"no assertion ran in the test case \"example: 2 ranks\""});
  CHECK(not_run(without({"their_layer", "bias"})) == Complaints{no_bias});
  CHECK(not_run({}).size() == 4);
  // Assertions beside the subcase do not count, nor do those of a subcase in another one, or of another case.
  AssertionCounts counts = without({"their_layer", "bias"});
  counts[{"their_layer"}] = 3;
  counts[{"their_layer", "input is cut", "bias"}] = 3;
  counts[{"other", "bias"}] = 3;
  counts[{"their_layer", "bias"}] = 0;
  CHECK(not_run(counts) == Complaints{no_bias});
}

TEST_CASE("a name that several documents have is told apart by the document's number") {
  json two = kDocuments;
  two["002_other"] = {{"section", "Others"}, {"names", {{"their_layer", {"scale"}}}}};
  CHECK(cases_of(two) ==
        Cases{{"001 their_layer", {"bias", "input is cut"}}, {"002 their_layer", {"scale"}}, {"example: 2 ranks", {}}});
}
