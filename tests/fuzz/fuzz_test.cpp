// Gives every subject its seeds, the inputs that searches have kept, and inputs that are made of the seeds by a seed of
// this test's own. tools/fuzz searches further, guided by what the inputs reach.

#include <chrono>
#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/tests/fuzz/kept_inputs.h"
#include "tessera/tests/fuzz/subjects.h"
#include "tessera/tools/launcher/private_folder.h"

using namespace tessera::fuzz;

namespace {

void try_in_time(const Subject& subject, const std::string& input) {
  const auto before = std::chrono::steady_clock::now();
  try {
    try_input(subject, input);
  } catch (const std::exception& error) {
    FAIL_CHECK(fmt::format("{}: {}: {}", subject.name, error.what(), input));
  }
  // Sanitizers slow a reader down; a search that never ends is found all the same.
  if (std::chrono::steady_clock::now() - before > std::chrono::seconds(10)) {
    FAIL_CHECK(fmt::format("{}: an input took more than 10 s: {}", subject.name, input));
  }
}

}  // namespace

TEST_CASE("every subject accepts its seeds") {
  for (const Subject& each : subjects()) {
    CAPTURE(each.name);
    for (const std::string& seed : each.seeds) {
      CAPTURE(seed);
      CHECK_NOTHROW(each.read(seed));
    }
  }
}

TEST_CASE("no input makes a reader throw anything but invalid_argument and runtime_error, or take long") {
  constexpr uint64_t kInputs = 3000;
  for (const Subject& each : subjects()) {
    for (uint64_t seed = 0; seed < kInputs; ++seed) try_in_time(each, mutated(each.seeds, seed));
  }
  CHECK(subjects().size() >= 12);
}

TEST_CASE("nor does an input that a search has kept") {
  for (const Subject& each : subjects()) {
    CAPTURE(each.name);
    const std::vector<std::string> kept = read_inputs(kept_file(each.name));
    for (const std::string& input : kept) try_in_time(each, input);
    CHECK(kept.size() >= 10);
  }
}

TEST_CASE("kept inputs have every byte") {
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(byte);
  const tessera::PrivateFolder folder;
  const std::string file = folder.path() + "/kept.jsonl";
  write_inputs(file, {all, "", "x\n"});
  CHECK(read_inputs(file) == std::vector<std::string>{"", all, "x\n"});
  CHECK_THROWS_WITH(read_inputs("nowhere.jsonl"), "nowhere.jsonl cannot be read");
  std::ofstream(file) << "3\n";
  CHECK_THROWS_WITH(read_inputs(file), doctest::Contains("is not a JSON string: 3"));
}

TEST_CASE("a defect of a reader is passed on") {
  const Subject bad = {"bad", [](std::string_view) { throw std::logic_error("a property"); }, {"x"}};
  CHECK_THROWS_AS(try_input(bad, "x"), std::logic_error);
  const Subject odd = {"odd", [](std::string_view) { throw std::bad_alloc(); }, {"x"}};
  CHECK_THROWS_AS(try_input(odd, "x"), std::bad_alloc);
}
