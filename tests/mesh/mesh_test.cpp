#include "tessera/mesh/mesh.h"

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/tests/harness/refused.h"

using tessera::Mesh;
using Ints = std::vector<int64_t>;
using Names = std::vector<std::string>;

TEST_CASE("ranks are numbered row-major: the last mesh dimension varies fastest") {
  const Mesh mesh({2, 3}, {"dp", "tp"});
  CHECK(mesh.ranks() == Ints{0, 1, 2, 3, 4, 5});
  CHECK(mesh.size() == 6);
  CHECK(mesh.ndim() == 2);
  CHECK(mesh.coordinate_of(0) == Ints{0, 0});
  CHECK(mesh.coordinate_of(2) == Ints{0, 2});
  CHECK(mesh.coordinate_of(3) == Ints{1, 0});
  CHECK(mesh.coordinate_of(5) == Ints{1, 2});
  CHECK(mesh.coordinate_of(6) == std::nullopt);
  CHECK(mesh.coordinate_of(-1) == std::nullopt);
}

TEST_CASE("any order of ranks and any subset of a world is legal") {
  const Mesh column_major({2, 2}, {"dp", "tp"}, {0, 2, 1, 3});
  CHECK(column_major.coordinate_of(2) == Ints{0, 1});
  CHECK(column_major.coordinate_of(1) == Ints{1, 0});
  const Mesh subset({3}, {"tp"}, {7, 3, 5});
  CHECK(subset.coordinate_of(7) == Ints{0});
  CHECK(subset.coordinate_of(5) == Ints{2});
  CHECK(subset.coordinate_of(0) == std::nullopt);
}

TEST_CASE("sizes and names of mesh dimensions; negative indexes count from the end") {
  const Mesh mesh({2, 3, 4}, {"pp", "dp", "tp"});
  CHECK(mesh.size(0) == 2);
  CHECK(mesh.size(-1) == 4);
  CHECK(mesh.normalize(-3) == 0);
  CHECK(mesh.mesh_dim("pp") == 0);
  CHECK(mesh.mesh_dim("tp") == 2);
}

TEST_CASE("ranks_along lists the ranks that differ on one mesh dimension alone") {
  const Mesh mesh({2, 3}, {"dp", "tp"});
  CHECK(mesh.ranks_along(0, {0, 1}) == Ints{1, 4});
  CHECK(mesh.ranks_along(0, {1, 1}) == Ints{1, 4});
  CHECK(mesh.ranks_along(1, {1, 2}) == Ints{3, 4, 5});
  CHECK(mesh.ranks_along(-1, {0, 0}) == Ints{0, 1, 2});
  CHECK(Mesh({2, 2}, {}, {9, 4, 2, 6}).ranks_along(0, {0, 1}) == Ints{4, 6});
}

TEST_CASE("a slice keeps the named mesh dimensions, in the order of the names") {
  const Mesh mesh({2, 2, 2}, {"pp", "dp", "tp"});
  struct Row {
    const char* why;
    Names names;
    Ints coordinate;
    Ints shape;
    Ints ranks;
  };
  const std::vector<Row> rows = {
      {"the last, at the first", {"tp"}, {0, 0, 0}, {2}, {0, 1}},
      {"the last, elsewhere", {"tp"}, {1, 0, 1}, {2}, {4, 5}},
      {"the first", {"pp"}, {1, 1, 0}, {2}, {2, 6}},
      {"two in order", {"dp", "tp"}, {1, 0, 0}, {2, 2}, {4, 5, 6, 7}},
      {"two in the other order", {"tp", "dp"}, {1, 0, 0}, {2, 2}, {4, 6, 5, 7}},
      {"two that are not neighbours", {"pp", "tp"}, {0, 1, 0}, {2, 2}, {2, 3, 6, 7}},
      {"all, turned", {"tp", "dp", "pp"}, {0, 0, 0}, {2, 2, 2}, {0, 4, 2, 6, 1, 5, 3, 7}},
  };
  for (const Row& row : rows) {
    CAPTURE(row.why);
    const Mesh slice = mesh.slice(row.names, row.coordinate);
    CHECK(slice.shape() == row.shape);
    CHECK(slice.names() == row.names);
    CHECK(slice.ranks() == row.ranks);
  }
}

TEST_CASE("merged mesh dimensions are one, row-major in the order given, named by theirs") {
  const Mesh mesh({2, 2, 2}, {"pp", "dp", "tp"});
  struct Row {
    const char* why;
    Ints mesh_dims;
    Ints coordinate;
    const char* name;
    Ints ranks;
  };
  const std::vector<Row> rows = {
      {"one is its own", {2}, {1, 0, 1}, "tp", {4, 5}},
      {"neighbours", {1, 2}, {1, 0, 0}, "dp+tp", {4, 5, 6, 7}},
      {"neighbours, turned", {2, 1}, {1, 1, 1}, "tp+dp", {4, 6, 5, 7}},
      {"no neighbours", {0, 2}, {0, 1, 0}, "pp+tp", {2, 3, 6, 7}},
      {"counted from the end", {-3, -2}, {0, 0, 1}, "pp+dp", {1, 3, 5, 7}},
      {"all, turned", {2, 1, 0}, {0, 0, 0}, "tp+dp+pp", {0, 4, 2, 6, 1, 5, 3, 7}},
  };
  for (const Row& row : rows) {
    CAPTURE(row.why);
    const Mesh merged = mesh.merged(row.mesh_dims, row.coordinate);
    CHECK(merged == Mesh({static_cast<int64_t>(row.ranks.size())}, {row.name}, row.ranks));
    CHECK(mesh.ranks_over(row.mesh_dims, row.coordinate) == row.ranks);
  }
  const Mesh plain({2, 3});
  CHECK(plain.merged({0, 1}, {0, 0}) == Mesh({6}, {"0+1"}));
  CHECK(plain.merged({1}, {1, 0}) == Mesh({3}, {"1"}, {3, 4, 5}));
  CHECK(Mesh({3}).merged({0}, {2}) == Mesh({3}));
}

TEST_CASE("the place on merged mesh dimensions is row-major over the places on them") {
  const Mesh mesh({2, 3, 4}, {},
                  {11, 3, 5, 7, 0, 2, 4, 6, 8, 10, 1, 9, 12, 13, 14, 15, 23, 22, 21, 20, 19, 18, 17, 16});
  for (const int64_t rank : mesh.ranks()) {
    const Ints at = mesh.coordinate_of(rank).value();
    CHECK(mesh.merged({2, 0}, at).coordinate_of(rank) == Ints{at[2] * 2 + at[0]});
    CHECK(mesh.merged({1, 0, 2}, at).coordinate_of(rank) == Ints{(at[1] * 2 + at[0]) * 4 + at[2]});
  }
}

TEST_CASE("every rank is in the slice through its own coordinate, at its own coordinate") {
  const Mesh mesh({2, 3, 2}, {"a", "b", "c"}, {11, 3, 5, 7, 0, 2, 4, 6, 8, 10, 1, 9});
  for (const int64_t rank : mesh.ranks()) {
    const Ints at = mesh.coordinate_of(rank).value();
    CHECK(mesh.slice({"c", "a"}, at).coordinate_of(rank) == Ints{at[2], at[0]});
    CHECK(mesh.slice({"b"}, at).ranks() == mesh.ranks_along(1, at));
  }
}

TEST_CASE("meshes are compared by content") {
  CHECK(Mesh({2, 2}) == Mesh({2, 2}, {}, {0, 1, 2, 3}));
  CHECK(Mesh({2, 2}).hash() == Mesh({2, 2}, {}, {0, 1, 2, 3}).hash());
  CHECK_FALSE(Mesh({2, 2}) == Mesh({4}));
  CHECK_FALSE(Mesh({2}, {"dp"}) == Mesh({2}, {"tp"}));
  CHECK_FALSE(Mesh({2}, {"dp"}) == Mesh({2}));
  CHECK_FALSE(Mesh({2}, {}, {0, 1}) == Mesh({2}, {}, {1, 0}));
}

TEST_CASE("the text form shows names, sizes, and ranks that are not in order") {
  CHECK(Mesh({2, 4}, {"dp", "tp"}).to_string() == "{dp: 2, tp: 4}");
  CHECK(Mesh({2, 4}).to_string() == "(2, 4)");
  CHECK(Mesh({2}, {"tp"}, {2, 3}).to_string() == "{tp: 2} over ranks [2, 3]");
  std::ostringstream out;
  out << Mesh({3});
  CHECK(out.str() == "(3)");
}

TEST_CASE("a mesh of no dimensions holds one rank") {
  const Mesh mesh(Ints{});
  CHECK(mesh.size() == 1);
  CHECK(mesh.coordinate_of(0) == Ints{});
}

namespace {
void check_refused(const std::string& part, Ints shape, Names names, std::optional<Ints> ranks = std::nullopt) {
  CAPTURE(part);
  if (ranks.has_value()) {
    CHECK_THROWS_WITH_AS(Mesh(shape, names, *ranks), doctest::Contains(part.c_str()), std::invalid_argument);
  } else {
    CHECK_THROWS_WITH_AS(Mesh(shape, names), doctest::Contains(part.c_str()), std::invalid_argument);
  }
}
}  // namespace

TEST_CASE("what is no mesh is refused, with the values seen") {
  check_refused("shape (2, 0) has a size below 1", {2, 0}, {});
  check_refused("shape (-1) has a size below 1", {-1}, {});
  check_refused("the product of shape (4611686018427387904, 4) does not fit", {int64_t{1} << 62, 4}, {});
  check_refused("8589934592 ranks are more than 2^31", {int64_t{1} << 33}, {});
  check_refused("1 names (dp) for 2 mesh dimensions", {2, 2}, {"dp"});
  check_refused("name 'tp' appears twice in (tp, tp)", {2, 2}, {"tp", "tp"});
  check_refused("a name is empty", {2}, {""});
  check_refused("shape (2, 2) needs 4 ranks, 3 were given", {2, 2}, {}, Ints{0, 1, 2});
  check_refused("rank 1 appears twice", {3}, {}, Ints{1, 0, 1});
  check_refused("rank -2 is negative", {2}, {}, Ints{0, -2});
}

TEST_CASE("questions that a mesh has no answer to are refused, with what there is") {
  const Mesh mesh({2, 2}, {"dp", "tp"});
  using tessera::testing::check_refused;
  check_refused([&] { return mesh.mesh_dim("pp"); }, "has no mesh dimension 'pp'; there are: dp, tp");
  check_refused([&] { return Mesh({2}).mesh_dim("tp"); }, "mesh (2) has no names; 'tp' was asked for");
  check_refused([&] { return mesh.size(2); }, "mesh dimension 2 is out of range for mesh {dp: 2, tp: 2}");
  check_refused([&] { return mesh.normalize(-3); }, "mesh dimension -3 is out of range");
  check_refused([&] { return mesh.ranks_along(0, {0, 2}); }, "coordinate (0, 2) is outside mesh {dp: 2, tp: 2}");
  check_refused([&] { return mesh.ranks_along(0, {0}); }, "coordinate (0) is outside");
  check_refused(
      [&] {
        return mesh.ranks_over({0, -2}, {0, 0});
      },
      "mesh dimension dp of mesh {dp: 2, tp: 2} appears twice in (0, -2); give each once");
  check_refused(
      [&] {
        return mesh.merged({0, 2}, {0, 0});
      },
      "mesh dimension 2 is out of range for mesh {dp: 2, tp: 2}");
  check_refused([&] { return mesh.merged({}, {0, 0}); }, "no mesh dimensions of mesh {dp: 2, tp: 2} were given");
  check_refused([&] { return mesh.merged({0}, {2, 0}); }, "coordinate (2, 0) is outside mesh");
  check_refused([&] { return Mesh({2}).merged({1}, {0}); }, "mesh dimension 1 is out of range for mesh (2)");
  check_refused([&] { return mesh.mesh_dim_name(2); }, "mesh dimension 2 is out of range");
  check_refused([&] { return mesh.slice({"tp", "tp"}, {0, 0}); }, "name 'tp' appears twice");
  check_refused([&] { return mesh.slice({"pp"}, {0, 0}); }, "has no mesh dimension 'pp'");
  check_refused([&] { return mesh.slice({}, {0, 0}); }, "no names given");
  check_refused([&] { return mesh.slice({"tp"}, {2, 0}); }, "coordinate (2, 0) is outside");
  check_refused([&] { return Mesh({2}).slice({"tp"}, {0}); }, "has no names");
}
