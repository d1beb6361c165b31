#include "tessera/dtensor/bucket_plan.h"

#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace {

using namespace tessera;

std::vector<std::vector<std::size_t>> parameters_of(const BucketPlan& plan) {
  std::vector<std::vector<std::size_t>> out;
  for (const ArrivalOrder& bucket : plan) {
    out.emplace_back();
    for (const ArrivingGradient& each : bucket) out.back().push_back(each.parameter);
  }
  return out;
}

}  // namespace

TEST_CASE("the agreed order is the first rank's, then what only others have seen; the most arrivals count") {
  const ArrivalOrder first = {{.parameter = 3, .pending = "s-"}, {.parameter = 1, .pending = "ss"}};
  const ArrivalOrder second = {{.parameter = 1, .pending = "s-", .arrivals = 2},
                               {.parameter = 0, .pending = "s-"},
                               {.parameter = 3, .pending = "s-"}};
  CHECK(agreed_order({first, second}) == ArrivalOrder{{.parameter = 3, .pending = "s-"},
                                                      {.parameter = 1, .pending = "ss", .arrivals = 2},
                                                      {.parameter = 0, .pending = "s-"}});
  CHECK(agreed_order({{}, second}) == second);
  CHECK(agreed_order({}).empty());
}

TEST_CASE("an order is the same after it was printed and read; other texts are refused") {
  const ArrivalOrder order = {{.parameter = 12, .pending = "s-"}, {.parameter = 0, .pending = "-a", .arrivals = 3}};
  CHECK(to_string(order) == "12 s- 1\n0 -a 3\n");
  CHECK(parse_arrivals(to_string(order)) == order);
  CHECK(parse_arrivals("").empty());
  CHECK_THROWS_WITH_AS(parse_arrivals("12 s-"), "'12 s-' does not describe a gradient", std::runtime_error);
}

TEST_CASE("buckets are filled up to their size, one kind of collectives each, in the order of their last gradients") {
  ArrivalOrder order;
  for (std::size_t i = 0; i < 7; ++i) order.push_back({.parameter = i, .pending = i % 2 == 0 ? "s-" : "ss"});
  order[5].pending = "--";
  const auto kind = [](const ArrivingGradient& each) { return each.pending == "--" ? std::string() : each.pending; };
  const auto bytes = [](const ArrivingGradient& each) { return each.parameter == 4 ? int64_t{100} : int64_t{10}; };
  struct Row {
    const char* why;
    int64_t bucket_bytes;
    std::vector<std::vector<std::size_t>> want;
  };
  const std::vector<Row> rows = {
      {"everything fits", 1000, {{1, 3}, {0, 2, 4, 6}}},
      {"two fit, and one is larger than a bucket", 20, {{0, 2}, {1, 3}, {4}, {6}}},
      {"none fits", 1, {{0}, {1}, {2}, {3}, {4}, {6}}},
  };
  for (const Row& row : rows) {
    CAPTURE(row.why);
    CHECK(parameters_of(plan_buckets(order, row.bucket_bytes, kind, bytes)) == row.want);
  }
}
