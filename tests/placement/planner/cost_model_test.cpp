#include "tessera/placement/planner/cost_model.h"

#include <cstdint>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>

using namespace tessera;

namespace {

const Mesh kMesh({2, 1, 4}, {"dp", "one", "tp"});

// Adds samples that fit a link exactly.
void sample(std::vector<LinkSample>& out, int64_t mesh_dim, double microseconds, double bytes_per_microsecond) {
  for (const double bytes : {0.0, 1000.0, 5000.0}) {
    out.push_back({.mesh_dim = mesh_dim, .bytes = bytes, .microseconds = microseconds + bytes / bytes_per_microsecond});
  }
}

}  // namespace

TEST_CASE("links are found from measured times") {
  std::vector<LinkSample> samples;
  sample(samples, 2, 30, 200);
  sample(samples, 0, 7, 50);
  const CostModel model = CostModel::fitted(kMesh, samples);
  REQUIRE(model.links.size() == 3);
  CHECK(model.links[0].microseconds == doctest::Approx(7));
  CHECK(model.links[0].bytes_per_microsecond == doctest::Approx(50));
  CHECK(model.links[1] == Link{});  // a mesh dimension of size 1 has no link
  CHECK(model.links[2].microseconds == doctest::Approx(30));
  CHECK(model.links[2].bytes_per_microsecond == doctest::Approx(200));
}

TEST_CASE("of times that lie on no line the line of least squares is taken, from a latency of 0 on") {
  const Mesh line({4}, {"tp"});
  // The means are 2 and 4; the slope is (-2 * -3 + 0 * 0 + 2 * 3) / (4 + 0 + 4) = 1.5 us per byte, the latency 4 - 1.5
  // * 2 = 1 us.
  const CostModel model = CostModel::fitted(line, {{{0, 0, 1}, {0, 2, 4}, {0, 4, 7}}});
  CHECK(model.links[0].microseconds == doctest::Approx(1));
  CHECK(model.links[0].bytes_per_microsecond == doctest::Approx(1 / 1.5));
  // The line through both would begin below 0. Through 0 it has (1 * 1 + 2 * 4) / (1 + 4) = 1.8 us per byte.
  const CostModel through_zero = CostModel::fitted(line, {{{0, 1, 1}, {0, 2, 4}}});
  CHECK(through_zero.links[0].microseconds == 0);
  CHECK(through_zero.links[0].bytes_per_microsecond == doctest::Approx(1 / 1.8));
}

TEST_CASE("samples of which no link follows are refused") {
  const auto refused = [](const std::vector<LinkSample>& samples, const std::string& part) {
    CAPTURE(part);
    CHECK_THROWS_WITH_AS(CostModel::fitted(kMesh, samples), doctest::Contains(part.c_str()), std::invalid_argument);
  };
  std::vector<LinkSample> tp;
  sample(tp, 2, 30, 200);
  refused(tp, "CostModel::fitted: mesh dimension 0 has samples of 0 message sizes; measure at least 2");
  const auto with = [&](std::vector<LinkSample> more) {
    more.insert(more.end(), tp.begin(), tp.end());
    return more;
  };
  refused(with({{0, 8, 1}, {0, 8, 2}}), "mesh dimension 0 has samples of 1 message sizes");
  refused(with({{0, 8, 2}, {0, 16, 2}}), "do not grow with the bytes");
  refused(with({{0, 8, 2}, {0, 16, 1}}), "do not grow with the bytes");
  refused(with({{3, 8, 2}}), "a sample of mesh dimension 3, but the mesh {dp: 2, one: 1, tp: 4} has dimensions [0, 3)");
  refused(with({{-1, 8, 2}}), "a sample of mesh dimension -1");
  refused(with({{0, -8, 2}}), "a sample of -8 bytes in 2 us");
  refused(with({{0, 8, -2}}), "a sample of 8 bytes in -2 us");
  refused(with({{0, 8, std::numeric_limits<double>::infinity()}}), "a sample of 8 bytes in inf us");
  refused(with({{0, std::numeric_limits<double>::quiet_NaN(), 1}}), "a sample of nan bytes");
}

TEST_CASE("the text of a cost model is read back") {
  for (const CostModel& model : {CostModel::gloo(2), CostModel::bytes_only(1), CostModel{},
                                 CostModel{.links = {{0.1, 1.0 / 3}, {1e-7, 2e12}}}}) {
    CAPTURE(model.to_string());
    CHECK(parse_cost_model(model.to_string()) == model);
  }
  CHECK(CostModel::gloo(2).to_string() == "120 us + 2000 MB/s, 120 us + 2000 MB/s");
  for (const char* const text :
       {"120", "120 us", "120 us + x MB/s", "us + 3 MB/s", "1 us + 2 MB/s,", "1 us + 2 MB/s; "}) {
    CAPTURE(text);
    CHECK_THROWS_WITH_AS(parse_cost_model(text),
                         doctest::Contains("is no cost model; write a link for each mesh dimension"),
                         std::invalid_argument);
  }
}

TEST_CASE("in a step over several mesh dimensions bytes cross the slowest link between their two ranks") {
  const CostModel model{.links = {{10, 100}, {20, 400}, {5, 100}}};
  CHECK(model.over(std::vector<int64_t>{0, 1}) == Link{20, 100});
  std::vector<uint32_t> asked;
  const auto time = [&](uint32_t mesh_dims, const std::map<uint32_t, double>& received) {
    asked.clear();
    return model.microseconds(mesh_dims, [&](uint32_t some) {
      asked.push_back(some);
      return received.at(some);
    });
  };
  // The first mesh dimension and the last one are the slow ones.
  CHECK(time(0b001, {{0b101, 1000}, {0b111, 1000}}) == 10 + 10);
  CHECK(time(0b010, {{0b101, 0}, {0b111, 1000}}) == 20 + 2.5);
  // 3000 bytes come from ranks that differ along a slow mesh dimension, and 1000 from the others.
  CHECK(time(0b011, {{0b101, 3000}, {0b111, 4000}}) == 20 + 30 + 2.5);
  CHECK(time(0b101, {{0b101, 1000}, {0b111, 1000}}) == 10 + 10);
  // Ranks that share a slow link receive 3000 bytes over it in the mean, and one of them receives 4000.
  CHECK(time(0b100, {{0b101, 3000}, {0b111, 4000}}) == 5 + 30 + 2.5);
  CHECK(asked == std::vector<uint32_t>{0b101, 0b111});
}

TEST_CASE("a mesh dimension is inside the hosts when all its groups are") {
  const Mesh mesh({2, 4});
  const CostModel four = CostModel::nvlink_infiniband(mesh, 4);
  CHECK(four.links[1].bytes_per_microsecond > four.links[0].bytes_per_microsecond);
  const CostModel two = CostModel::nvlink_infiniband(mesh, 2);
  CHECK(two.links[0] == two.links[1]);
  CHECK_THROWS_WITH_AS(CostModel::nvlink_infiniband(mesh, 0),
                       doctest::Contains("CostModel: 0 ranks per host; give the number"), std::invalid_argument);
}

TEST_CASE("a cost model that does not fit is refused") {
  const auto refused = [](const CostModel& model) {
    CHECK_THROWS_WITH_AS(
        check_cost_model(model, 1, "test"),
        doctest::Contains(
            "does not fit a mesh of 1 dimensions; give each a latency of at least 0 and a bandwidth above 0"),
        std::invalid_argument);
  };
  check_cost_model(CostModel::gloo(1), 1, "test");
  refused(CostModel::gloo(2));
  refused({});
  refused({.links = {{-1, 1}}});
  refused({.links = {{1, 0}}});
  refused({.links = {{std::numeric_limits<double>::infinity(), 1}}});
  refused({.links = {{std::numeric_limits<double>::quiet_NaN(), 1}}});
}
