// Tests that errors which only one rank can see reach every rank within five seconds.

#include <chrono>
#include <stdexcept>
#include <string>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/harness/text.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Returns the text of what `body` throws, which must happen within five seconds; "" if it throws nothing.
template <class Body>
std::string thrown_soon(const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  std::string text;
  try {
    body();
  } catch (const std::exception& error) {
    text = error.what();
  }
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
  return text;
}

}  // namespace

TESSERA_RANKS_TEST_CASE("an index out of range on one shard ends every rank with that text", {2, 4}) {
  const DeviceMesh mesh = line();
  at::Tensor ids = at::zeros({3}, at::kLong);
  if (mesh.local_rank(0) == 1) ids[2] = 77;
  const std::string text = thrown_soon([&] {
    const at::Tensor rows = at::embedding(spread(sample({7, 2}), mesh, {R}), from_local(ids, mesh, {S0}));
    full_tensor(rows);
  });
  CAPTURE(text);
  CHECK(contains(text, "out of range"));
  if (mesh.local_rank(0) != 1) CHECK(contains(text, "rank 1 failed in aten::embedding"));
}

TESSERA_RANKS_TEST_CASE("so does one in a table that is split by rows", {2}) {
  const DeviceMesh mesh = line();
  const std::string text = thrown_soon([&] {
    full_tensor(at::embedding(spread(sample({7, 2}), mesh, {S0}), spread(at::tensor({1, 7}), mesh, {R})));
  });
  CHECK(contains(text, "index 7 is outside the table's rows [0, 7)"));
}

TESSERA_RANKS_TEST_CASE("a piece of the wrong size on one rank is an error on all, with and without check", {3}) {
  const DeviceMesh mesh = line();
  const at::Tensor piece = at::ones({mesh.local_rank(0) == 2 ? 3 : 2, 4});
  FromLocalOptions options;
  options.shape = std::vector<int64_t>{6, 4};
  options.check = true;
  const std::string text = thrown_soon([&] { from_local(piece, mesh, {S0}, options); });
  CAPTURE(text);
  CHECK(contains(text, "the pieces do not make one tensor [6, 4] as [S(0)]"));
  CHECK(contains(text, "rank 2 has a piece [3, 4], not [2, 4]"));
  options.shape.reset();
  const std::string replicas =
      thrown_soon([&] { from_local(at::ones({2}) * (mesh.local_rank(0) == 1), mesh, {R}, options); });
  CHECK(contains(replicas, "rank 1 differs in content from rank 0"));
  const std::string types = thrown_soon(
      [&] { from_local(at::ones({2}, mesh.local_rank(0) == 1 ? at::kLong : at::kFloat), mesh, {S0}, options); });
  CHECK(contains(types, "rank 1 has dtype Long, not Float"));
  // The job still runs.
  CHECK(full_tensor(from_local(at::ones({2}), mesh, {S0}, options)).size(0) == 6);
  // Without check, the rank that sees the error fails the job.
  options.check = false;
  options.shape = std::vector<int64_t>{6, 4};
  const std::string told = thrown_soon([&] { full_tensor(from_local(piece, mesh, {S0}, options)); });
  CAPTURE(told);
  CHECK(contains(told, "this rank's piece is [3, 4]"));
}
