#include "tessera/placement/placement.h"

#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>

using namespace tessera;

TEST_CASE("placements are compared by kind, dimension and reduction") {
  CHECK(Shard(0) == Shard(0));
  CHECK(Shard(0) != Shard(1));
  CHECK(Shard(0) != Replicate());
  CHECK(Partial() == Partial(ReduceOp::kSum));
  CHECK(Partial(ReduceOp::kMax) != Partial(ReduceOp::kMin));
  CHECK(Placement() == Replicate());
  CHECK(Shard(2).is_shard(2));
  CHECK_FALSE(Shard(2).is_shard(1));
  CHECK_FALSE(Replicate().is_shard(0));
  CHECK(Partial(ReduceOp::kAvg).is_partial(ReduceOp::kAvg));
  CHECK_FALSE(Partial(ReduceOp::kAvg).is_partial(ReduceOp::kSum));
}

TEST_CASE("a list of placements says whether any is pending, or all are whole") {
  CHECK(any_partial({Shard(0), Partial()}));
  CHECK_FALSE(any_partial({Shard(0), Replicate()}));
  CHECK_FALSE(any_partial({}));
  CHECK(all_replicate({Replicate(), Replicate()}));
  CHECK_FALSE(all_replicate({Replicate(), Shard(1)}));
  CHECK(all_replicate({}));
}

TEST_CASE("pending reductions of one kind commute, and sums with averages") {
  const Placement sum = Partial();
  const Placement avg = Partial(ReduceOp::kAvg);
  const Placement max = Partial(ReduceOp::kMax);
  CHECK(partials_commute({}));
  CHECK(partials_commute({Shard(0), Replicate()}));
  CHECK(partials_commute({max, Shard(0), max}));
  CHECK(partials_commute({sum, Replicate(), avg}));
  CHECK_FALSE(partials_commute({sum, max}));
  CHECK_FALSE(partials_commute({Shard(0), max, Partial(ReduceOp::kMin)}));
  CHECK_FALSE(partials_commute({Partial(ReduceOp::kProduct), Replicate(), sum}));
}

TEST_CASE("the text of a placement is read back") {
  struct Row {
    Placement placement;
    std::string text;
  };
  const std::vector<Row> rows = {
      {Replicate(), "R"},
      {Shard(0), "S(0)"},
      {Shard(-1), "S(-1)"},
      {Shard(12), "S(12)"},
      {Partial(), "P(sum)"},
      {Partial(ReduceOp::kAvg), "P(avg)"},
      {Partial(ReduceOp::kMax), "P(max)"},
      {Partial(ReduceOp::kMin), "P(min)"},
      {Partial(ReduceOp::kProduct), "P(product)"},
      {Partial(ReduceOp::kBitAnd), "P(bit_and)"},
      {Partial(ReduceOp::kBitOr), "P(bit_or)"},
      {Partial(ReduceOp::kBitXor), "P(bit_xor)"},
      {NormPartial(2), "P(norm 2)"},
      {NormPartial(-0.5), "P(norm -0.5)"},
      {MaskedPartial(), "P(masked sum)"},
      {MaskedPartial(ReduceOp::kMax), "P(masked max)"},
      {Shard(0).ordered(2), "S(0)@2"},
      {BlockCyclic(1, 4), "BC(1,4)"},
      {BlockCyclic(-2, 4).ordered(1), "BC(-2,4)@1"},
      {RaggedShard(0, {3, 0, 5}), "RS(0,3,0,5)"},
      {IntervalShard(1, {{{0, 2}, {6, 8}}, {{2, 6}}, {}}), "IS(1,0-2+6-8,2-6,-)"},
  };
  Placements all;
  for (const Row& row : rows) {
    CAPTURE(row.text);
    CHECK(to_string(row.placement) == row.text);
    CHECK(parse_placement(row.text) == row.placement);
    CHECK(parse_placement("  " + row.text + " ") == row.placement);
    std::ostringstream out;
    out << row.placement;
    CHECK(out.str() == row.text);
    all.push_back(row.placement);
  }
  CHECK(parse_placements(to_string(all)) == all);
  CHECK(to_string(Placements{Shard(0), Replicate()}) == "[S(0), R]");
  CHECK(parse_placements("[S(0),R ,P(max)]") == Placements{Shard(0), Replicate(), Partial(ReduceOp::kMax)});
  CHECK(parse_placements("[]").empty());
  CHECK(to_string(Placements{}) == "[]");
}

TEST_CASE("text that is no placement is refused with the forms there are") {
  const std::vector<std::string> bad = {
      "",       "X",       "S",       "S()",    "S(a)",   "S(0",    "S 0",       "r",       "P",        "P()",
      "P(add)", "P(sum))", "S(0) R",  "S(1.5)", "R(0)",   "S(0,1)", "P(SUM)",    "S( 0)",   "BC(0)",    "BC(0,1,2)",
      "RS(0)",  "IS(0)",   "IS(0,1)", "S(0)@",  "S(0)@x", "R@1",    "P(norm x)", "P(norm)", "P(masked)"};
  for (const std::string& text : bad) {
    CAPTURE(text);
    const std::string part = "parse_placement: \"" + text + "\" is no placement; write R, S(dim)";
    CHECK_THROWS_WITH_AS(parse_placement(text), doctest::Contains(part.c_str()), std::invalid_argument);
  }
  for (const char* const text : {"BC(0,0)", "RS(0,-1,3)", "IS(0,3-1)", "S(0)@70000", "P(norm 0)"}) {
    const std::string part = std::string("parse_placement: \"") + text + "\" is no placement (";
    CHECK_THROWS_WITH_AS(parse_placements(std::string("[") + text + ", R]"), doctest::Contains(part.c_str()),
                         std::invalid_argument);
  }
  for (const char* const text : {"S(0)", "[S(0)", "S(0)]", "", "["}) {
    CAPTURE(text);
    CHECK_THROWS_WITH_AS(parse_placements(text), doctest::Contains("is no list of placements; write e.g. [S(0), R]"),
                         std::invalid_argument);
  }
  for (const char* const text : {"[, R]", "[,R]", "[S(0) R]", "[R,,R]"}) {
    CAPTURE(text);
    CHECK_THROWS_WITH_AS(parse_placements(text), doctest::Contains("is no placement"), std::invalid_argument);
  }
}

TEST_CASE("what a placement has not cannot be asked of it") {
  CHECK_THROWS_WITH_AS(Replicate().partition(), doctest::Contains("R is no Shard and has no partition"),
                       std::logic_error);
  CHECK_THROWS_WITH_AS(Shard(0).reduction(), doctest::Contains("S(0) is no Partial and has no reduction"),
                       std::logic_error);
  CHECK_THROWS_WITH_AS(Partial().on(1), doctest::Contains("P(sum) is on no tensor dimension"), std::logic_error);
  CHECK_THROWS_WITH_AS(Shard(0).ordered(-1), doctest::Contains("S(0) cannot have order -1; a Shard has one, from 0"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(Shard(0).ordered(1 << 17), doctest::Contains("cannot have order 131072"), std::invalid_argument);
}
