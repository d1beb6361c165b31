#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/mesh/mesh.h"
#include "tessera/tests/harness/refused.h"

using tessera::Mesh;
using tessera::MeshDims;
using tessera::testing::check_refused;
using Ints = std::vector<int64_t>;
using Names = std::vector<std::string>;

namespace {

Mesh cube() { return Mesh({2, 2, 2}, {"pp", "dp", "tp"}); }

// Makes a mesh of 24 ranks in a shuffled order.
Mesh shuffled(const Names& names) {
  return Mesh({2, 3, 4}, names, {11, 3, 5, 7, 0, 2, 4, 6, 8, 10, 1, 9, 12, 13, 14, 15, 23, 22, 21, 20, 19, 18, 17, 16});
}

}  // namespace

TEST_CASE("flatten merges mesh dimensions where the leftmost stood, row-major in the order given") {
  struct Row {
    const char* why;
    MeshDims mesh_dims;
    const char* name;
    Mesh want;
  };
  const std::vector<Row> rows = {
      {"neighbours, by name", {"dp", "tp"}, "", Mesh({2, 4}, {"pp", "dp+tp"})},
      {"neighbours, by index", {0, 1}, "data", Mesh({4, 2}, {"data", "tp"})},
      {"turned", {"tp", "dp"}, "", Mesh({2, 4}, {"pp", "tp+dp"}, {0, 2, 1, 3, 4, 6, 5, 7})},
      {"no neighbours", {"pp", "tp"}, "edge", Mesh({4, 2}, {"edge", "dp"}, {0, 2, 1, 3, 4, 6, 5, 7})},
      {"no neighbours, turned", {2, 0}, "edge", Mesh({4, 2}, {"edge", "dp"}, {0, 2, 4, 6, 1, 3, 5, 7})},
      {"from the end", {-1, -2}, "x", Mesh({2, 4}, {"pp", "x"}, {0, 2, 1, 3, 4, 6, 5, 7})},
      {"all", {0, 1, 2}, "", Mesh({8}, {"pp+dp+tp"})},
      {"one takes a new name", {"dp"}, "cp", Mesh({2, 2, 2}, {"pp", "cp", "tp"})},
      {"the name of one that goes is free", {"pp", "dp"}, "dp", Mesh({4, 2}, {"dp", "tp"})},
  };
  for (const Row& row : rows) {
    CAPTURE(row.why);
    CHECK(cube().flatten(row.mesh_dims, row.name) == row.want);
  }
  CHECK(Mesh({2, 3, 2}).flatten({1, 2}) == Mesh({2, 6}));
  CHECK(Mesh({2, 3}).flatten({0, 1}, "world") == Mesh({6}, {"world"}));
  CHECK(Mesh({2, 2}, {}, {7, 3, 5, 1}).flatten({0, 1}) == Mesh({4}, {}, {7, 3, 5, 1}));
}

TEST_CASE("a slice that is flattened is the merged mesh") {
  const Mesh mesh = shuffled({"a", "b", "c"});
  for (const int64_t rank : mesh.ranks()) {
    const Ints at = mesh.coordinate_of(rank).value();
    CHECK(mesh.slice({"c", "a"}, at).flatten({"c", "a"}) == mesh.merged({2, 0}, at));
    CHECK(mesh.flatten({"c", "a"}).coordinate_of(rank) == Ints{at[2] * 2 + at[0], at[1]});
  }
}

TEST_CASE("what cannot be flattened is refused, with the values seen") {
  check_refused([] { cube().flatten(Ints{}); }, "flatten: no mesh dimensions of mesh {pp: 2, dp: 2, tp: 2} were given");
  check_refused(
      [] {
        cube().flatten({"dp", "dp"});
      },
      "mesh dimension dp of mesh {pp: 2, dp: 2, tp: 2} appears twice in (dp, dp); give each once");
  check_refused(
      [] {
        cube().flatten({0, -3});
      },
      "mesh dimension pp of mesh {pp: 2, dp: 2, tp: 2} appears twice in (0, -3)");
  check_refused([] { cube().flatten({"dp", "cp"}); }, "has no mesh dimension 'cp'; there are: pp, dp, tp");
  check_refused([] { cube().flatten({1, 3}); }, "mesh dimension 3 is out of range");
  check_refused(
      [] {
        cube().flatten({0, 1}, "tp");
      },
      "name 'tp' appears twice in (tp, tp); give each mesh dimension its own");
  check_refused([] { Mesh({2, 2}).flatten({"dp"}); }, "mesh (2, 2) has no names; 'dp' was asked for");
  check_refused(
      [] {
        Mesh({2, 2, 2}).flatten({0, 1}, "dp");
      },
      "flatten: mesh (2, 2, 2) has no names, and (dp) would name only some of the mesh dimensions; give no name");
}

TEST_CASE("unflatten splits a mesh dimension, the last part varying fastest") {
  CHECK(Mesh({8}, {"world"}).unflatten("world", {2, 4}, {"dp", "tp"}) == Mesh({2, 4}, {"dp", "tp"}));
  CHECK(Mesh({2, 6}, {"pp", "x"}).unflatten(-1, {3, 1, 2}, {"a", "b", "c"}) ==
        Mesh({2, 3, 1, 2}, {"pp", "a", "b", "c"}));
  CHECK(Mesh({4, 2}, {"x", "tp"}, {7, 6, 5, 4, 3, 2, 1, 0}).unflatten(0, {2, 2}, {"pp", "dp"}) ==
        Mesh({2, 2, 2}, {"pp", "dp", "tp"}, {7, 6, 5, 4, 3, 2, 1, 0}));
  CHECK(Mesh({4, 2}).unflatten(0, {2, 2}) == Mesh({2, 2, 2}));
  CHECK(Mesh({4}).unflatten(0, {2, 2}, {"dp", "tp"}) == Mesh({2, 2}, {"dp", "tp"}));
  CHECK(cube().unflatten("dp", {2}, {"cp"}) == Mesh({2, 2, 2}, {"pp", "cp", "tp"}));
}

TEST_CASE("neighbours that are flattened and split again are the mesh that they were") {
  const Mesh named = shuffled({"a", "b", "c"});
  CHECK(named.flatten({"a", "b"}).unflatten("a+b", {2, 3}, {"a", "b"}) == named);
  CHECK(named.flatten({1, 2}).unflatten(1, {3, 4}, {"b", "c"}) == named);
  const Mesh plain = shuffled({});
  CHECK(plain.flatten({0, 1, 2}).unflatten(0, {2, 3, 4}) == plain);
}

TEST_CASE("what cannot be unflattened is refused, with the values seen") {
  const Mesh mesh({2, 6}, {"pp", "x"});
  check_refused(
      [&] {
        mesh.unflatten("x", {2, 2}, {"a", "b"});
      },
      "unflatten: sizes (2, 2) do not make mesh dimension x of mesh {pp: 2, x: 6}; give sizes whose product is 6");
  check_refused([&] { mesh.unflatten("x", {4, 3}, {"a", "b"}); }, "sizes (4, 3) do not make mesh dimension x");
  check_refused([&] { mesh.unflatten("x", {}, {}); }, "sizes () do not make mesh dimension x");
  check_refused([&] { mesh.unflatten("x", {0, 6}, {"a", "b"}); }, "sizes (0, 6) do not make mesh dimension x");
  check_refused([&] { mesh.unflatten("x", {-2, -3}, {"a", "b"}); }, "sizes (-2, -3) do not make mesh dimension x");
  check_refused(
      [&] {
        mesh.unflatten("x", {2, 3}, {"a"});
      },
      "unflatten: 1 names (a) for 2 sizes (2, 3) in mesh {pp: 2, x: 6}; give one name per size");
  check_refused([&] { mesh.unflatten(1, {2, 3}); }, "unflatten: 0 names () for 2 sizes (2, 3)");
  check_refused([&] { mesh.unflatten("x", {2, 3}, {"a", "pp"}); }, "name 'pp' appears twice in (pp, a, pp)");
  check_refused([&] { mesh.unflatten("dp", {2, 3}, {"a", "b"}); }, "has no mesh dimension 'dp'; there are: pp, x");
  check_refused([&] { mesh.unflatten(2, {2, 3}, {"a", "b"}); }, "mesh dimension 2 is out of range");
  check_refused(
      [] {
        Mesh({2, 4}).unflatten(1, {2, 2}, {"a", "b"});
      },
      "unflatten: mesh (2, 4) has no names, and (a, b) would name only some of the mesh dimensions");
}

TEST_CASE("concatenate joins the mesh dimensions of parts that share one rank") {
  const Mesh mesh = cube();
  const Ints at = {1, 0, 0};
  CHECK(mesh.concatenate({mesh.slice({"dp"}, at), mesh.slice({"tp"}, at)}) == mesh.slice({"dp", "tp"}, at));
  CHECK(mesh.concatenate({mesh.slice({"tp"}, at), mesh.slice({"pp"}, at)}) == Mesh({2, 2}, {"tp", "pp"}, {0, 4, 1, 5}));
  CHECK(mesh.concatenate({mesh.merged({0, 1}, at), mesh.slice({"tp"}, at)}) == Mesh({4, 2}, {"pp+dp", "tp"}));
  CHECK(mesh.concatenate({mesh.merged({2, 0}, at), mesh.slice({"dp"}, at)}) ==
        Mesh({4, 2}, {"tp+pp", "dp"}, {0, 2, 4, 6, 1, 3, 5, 7}));
  CHECK(mesh.concatenate({mesh.slice({"tp"}, at)}) == mesh.slice({"tp"}, at));
  CHECK(mesh.concatenate({mesh}) == mesh);
  const Mesh split = mesh.slice({"dp", "tp"}, at).flatten({"dp", "tp"}).unflatten(0, {2, 2}, {"a", "b"});
  CHECK(mesh.concatenate({mesh.slice({"pp"}, at), split}) == Mesh({2, 2, 2}, {"pp", "a", "b"}));
  CHECK(Mesh({2, 2}).concatenate({Mesh({2}, {}, {1, 3}), Mesh({2}, {}, {2, 3})}) == Mesh({2, 2}, {}, {0, 1, 2, 3}));
  // A mesh dimension of size 1 has no stride to extend.
  CHECK(mesh.concatenate({mesh.slice({"dp"}, at), Mesh({1}, {"one"}, {4})}) == Mesh({2, 1}, {"dp", "one"}, {4, 6}));
}

TEST_CASE("slices of any mesh, concatenated at any rank, are the slice over all their names") {
  const Mesh mesh = shuffled({"a", "b", "c"});
  for (const int64_t rank : mesh.ranks()) {
    const Ints at = mesh.coordinate_of(rank).value();
    CHECK(mesh.concatenate({mesh.slice({"c"}, at), mesh.slice({"a", "b"}, at)}) == mesh.slice({"c", "a", "b"}, at));
    CHECK(mesh.concatenate({mesh.slice({"b"}, at), mesh.slice({"a"}, at)}) == mesh.slice({"b", "a"}, at));
  }
}

TEST_CASE("what cannot be concatenated is refused, with the values seen") {
  const Mesh mesh = cube();
  const auto slice = [&](const Names& names, const Ints& at) { return mesh.slice(names, at); };
  check_refused([&] { mesh.concatenate({}); }, "concatenate: no parts of mesh {pp: 2, dp: 2, tp: 2} were given");
  check_refused(
      [&] {
        mesh.concatenate({slice({"tp"}, {0, 0, 0}), Mesh({2}, {"x"}, {0, 8})});
      },
      "concatenate: rank 8 of {x: 2} over ranks [0, 8] is not in mesh {pp: 2, dp: 2, tp: 2}; call it on the mesh");
  check_refused(
      [&] {
        mesh.concatenate({slice({"tp"}, {0, 0, 0}), Mesh({2}, {}, {0, 2})});
      },
      "concatenate: of {tp: 2} and (2) over ranks [0, 2] some have names and some have none; name all, or none");
  check_refused(
      [&] {
        mesh.concatenate({slice({"tp"}, {0, 0, 0}), slice({"dp"}, {1, 0, 0})});
      },
      "concatenate: {tp: 2} and {dp: 2} over ranks [4, 6] have no rank in common; take slices through one");
  check_refused(
      [&] {
        mesh.concatenate({slice({"dp", "tp"}, {0, 0, 0}), slice({"pp", "dp"}, {0, 0, 0})});
      },
      "concatenate: {dp: 2, tp: 2} and {pp: 2, dp: 2} over ranks [0, 2, 4, 6] overlap: both extend along mesh "
      "dimension dp of mesh {pp: 2, dp: 2, tp: 2}; give each to one part");
  check_refused(
      [&] {
        mesh.concatenate({slice({"tp"}, {0, 0, 0}), slice({"tp"}, {0, 0, 0})});
      },
      "both extend along mesh dimension tp");
  check_refused(
      [&] {
        mesh.concatenate({slice({"tp"}, {0, 0, 0}), Mesh({2}, {"tp"}, {0, 2})});
      },
      "name 'tp' appears twice in (tp, tp)");
}

TEST_CASE("ranks that go up by one step are found and told apart without looking through them") {
  const Mesh step({3}, {}, {3, 5, 7});
  CHECK(step.coordinate_of(3) == Ints{0});
  CHECK(step.coordinate_of(7) == Ints{2});
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min(), kMost = std::numeric_limits<int64_t>::max();
  for (const int64_t rank : {kLeast, int64_t{-1}, int64_t{1}, int64_t{4}, int64_t{6}, int64_t{9}, kMost}) {
    CAPTURE(rank);
    CHECK(step.coordinate_of(rank) == std::nullopt);
  }
  CHECK(Mesh({1}, {}, {9}).coordinate_of(9) == Ints{0});
  CHECK(Mesh({1}, {}, {9}).coordinate_of(10) == std::nullopt);
  CHECK(Mesh({3}, {}, {7, 5, 3}).coordinate_of(3) == Ints{2});
  CHECK(Mesh({3}, {}, {3, 5, 6}).coordinate_of(6) == Ints{2});
  CHECK_FALSE(Mesh({3}, {}, {3, 5, 7}) == Mesh({3}, {}, {3, 4, 5}));
  CHECK_FALSE(Mesh({3}, {}, {3, 5, 7}) == Mesh({3}, {}, {4, 6, 8}));
  CHECK_FALSE(Mesh({3}, {}, {3, 5, 7}) == Mesh({3}, {}, {3, 5, 8}));
  CHECK(Mesh({3}, {}, {3, 5, 8}) == Mesh({3}, {}, {3, 5, 8}));
  check_refused([] { Mesh({2}, {}, {kLeast, kMost}); }, "rank -9223372036854775808 is negative");
}
