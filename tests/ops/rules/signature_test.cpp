#include "tessera/ops/rules/signature.h"

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/tests/ops/rules/sample.h"

using namespace tessera;
using namespace tessera::rules;

namespace {

using Sizes = std::vector<int64_t>;

// Returns the labels of tensors of these sizes; the operator's schema does not matter.
std::string labels(std::string_view signature, const std::vector<Sizes>& inputs, const std::vector<Sizes>& outputs) {
  OpCall call{
      .schema = testing::find_op("aten::neg").schema(), .args = {}, .inputs = {}, .outputs = {}, .first_input = {}};
  for (const Sizes& sizes : inputs) call.inputs.push_back({.sizes = sizes});
  for (const Sizes& sizes : outputs) call.outputs.push_back({.sizes = sizes});
  const std::optional<Signature> read = read_signature(signature, call);
  if (!read) return "none";
  std::string out;
  for (const Labels& l : read->inputs) out += l + " ";
  out += ">";
  for (const Labels& l : read->outputs) out += " " + l;
  return out;
}

}  // namespace

TEST_CASE("signatures give every dimension its factor") {
  CHECK(labels("*-- -> *--, *", {{5, 3, 3}}, {{5, 3, 3}, {5}}) == "A-- > A-- A");
  CHECK(labels("*-- -> *--, *", {{3, 3}}, {{3, 3}, {}}) == "-- > -- ");
  CHECK(labels("*p-, *r- -> *pr", {{4, 3}, {5, 2, 3}}, {{5, 4, 2}}) == "p- Ar- > Apr");
  CHECK(labels("*p-, *r- -> *pr", {{1, 4, 3}, {5, 2, 3}}, {{5, 4, 2}}) == "-p- Ar- > Apr");
  CHECK(labels("nc--, n--- -> nc--", {{3, 4, 5, 6}, {3, 1, 1, 2}}, {{3, 4, 1, 1}}) == "nc-- n--- > nc--");
  CHECK(labels("~, * -> *", {{4, 5}, {2, 3}}, {{2, 3}}) == "-- AB > AB");
}

TEST_CASE("what does not fit has no factors") {
  CHECK(labels("*-- -> *--", {{3}}, {{3}}) == "none");
  CHECK(labels("n- -> n-", {{3, 4, 5}}, {{3, 4, 5}}) == "none");
  CHECK(labels("*-- -> *--", {{3, 4}, {3, 4}}, {{3, 4}}) == "none");
  CHECK(labels("*-- -> *--, *--", {{3, 4}}, {{3, 4}}) == "none");
  // With a vector on the right, the result has no batch of its own.
  CHECK(labels("*--, *-- -> *--", {{5, 3, 3}, {5, 3}}, {{5, 3}}) == "none");
}
