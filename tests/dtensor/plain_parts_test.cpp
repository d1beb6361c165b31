#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/layers/broadcast_data.h"
#include "tessera/layers/tensor_chunks.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

using Data = std::map<std::string, at::Tensor>;

}  // namespace

TEST_CASE("split_along_last_dim: views, or contiguous copies") {
  const at::Tensor x = at::arange(24).view({2, 3, 4});
  const std::vector<at::Tensor> views = split_along_last_dim(x, 2);
  REQUIRE(views.size() == 2);
  CHECK(at::equal(views[0], x.slice(2, 0, 2)));
  CHECK(at::equal(views[1], x.slice(2, 2, 4)));
  CHECK(views[1].is_alias_of(x));
  CHECK_FALSE(views[1].is_contiguous());
  const std::vector<at::Tensor> copies = split_along_last_dim(x, 2, /*contiguous_split_chunks=*/true);
  CHECK(at::equal(copies[1], views[1]));
  CHECK(copies[1].is_contiguous());
  CHECK_FALSE(copies[1].is_alias_of(x));
  for (const at::Tensor& whole : {at::arange(4), x}) {
    const at::Tensor before = whole.clone();
    for (const int64_t parts : {1, 2}) {
      for (const at::Tensor& copy : split_along_last_dim(whole, parts, /*contiguous_split_chunks=*/true)) copy.zero_();
    }
    CHECK(at::equal(whole, before));
  }
  CHECK_THROWS_WITH_AS(split_along_last_dim(x, 3), "split_along_last_dim: 4 is not divisible by 3",
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(split_along_last_dim(at::ones({}), 1), doctest::Contains("no dimensions"),
                       std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE("equal chunks of a tensor go round, and no element is dropped", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const int64_t n = mesh.size(), me = mesh.local_rank(0);
  const at::Tensor x = sample({3, 4 * n});
  CommCounter counter(mesh);
  const at::Tensor chunk = split_into_1d_equal_chunks(x, mesh);
  CHECK(counter.total() == 0);
  CHECK(same(chunk, x.view({-1}).slice(0, 12 * me, 12 * me + 12)));
  CHECK(chunk.is_alias_of(x));
  const at::Tensor own = split_into_1d_equal_chunks(x, mesh, /*new_buffer=*/true);
  CHECK(same(own, chunk));
  CHECK_FALSE(own.is_alias_of(x));
  CHECK(same(gather_split_1d_tensor(chunk, mesh).view({3, 4 * n}), x));
  CHECK(counter.count("all_gather") == (n == 1 ? 0 : 1));
  CHECK(same(split_into_1d_equal_chunks(x.t(), mesh), x.t().reshape({-1}).slice(0, 12 * me, 12 * me + 12)));
  if (n > 1) {
    CHECK_THROWS_WITH_AS(split_into_1d_equal_chunks(at::ones({n + 1}, on(at::kFloat)), mesh),
                         doctest::Contains("is not divisible by"), std::invalid_argument);
  }
  CHECK_THROWS_WITH_AS(gather_split_1d_tensor(x, mesh), doctest::Contains("a part is 1-D"), std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE("chunks are of plain tensors", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor cut = spread(sample({4}), mesh, {Shard(0)});
  CHECK_THROWS_WITH_AS(split_into_1d_equal_chunks(cut, mesh), doctest::Contains("the tensor is a DTensor"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(gather_split_1d_tensor(cut, mesh), doctest::Contains("the tensor is a DTensor"),
                       std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE("broadcast_data: the first rank's tensors by name, of any shape", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  Data data;
  if (mesh.local_rank(0) == 0) {
    for (int64_t i = 0; i < 8; ++i) data.emplace(std::to_string(i), at::full({8, 8}, 1.F * i, on(at::kFloat)));
    data.emplace("scalar", at::full({}, 3.F, on(at::kFloat)));
    data.emplace("nothing", at::empty({0, 5}, on(at::kFloat)));
    data.emplace("deep", at::arange(64, on(at::kFloat)).view({2, 2, 2, 2, 2, 2}).transpose(0, 5));
    data.emplace("other", at::ones({3}, on(at::kLong)));  // not requested
  }
  CommCounter counter(mesh);
  const Data got = broadcast_data({"1", "0", "deep", "nothing", "scalar"}, data, at::kFloat, mesh);
  CHECK(got.size() == 5);
  CHECK(same(got.at("0"), at::zeros({8, 8}, on(at::kFloat))));
  CHECK(same(got.at("1"), at::ones({8, 8}, on(at::kFloat))));
  CHECK(same(got.at("deep"), at::arange(64, on(at::kFloat)).view({2, 2, 2, 2, 2, 2}).transpose(0, 5)));
  CHECK(same(got.at("nothing"), at::empty({0, 5}, on(at::kFloat))));
  CHECK(same(got.at("scalar"), at::full({}, 3.F, on(at::kFloat))));
  CHECK(counter.count("broadcast") == (mesh.size() == 1 ? 0 : 3));
  CHECK(counter.total() == (mesh.size() == 1 ? 0 : 4));
  CHECK(broadcast_data({}, data, at::kFloat, mesh).empty());
}

TESSERA_RANKS_TEST_CASE("one_rank_errors: what broadcast_data finds on the first rank is thrown on every one", {2, 3}) {
  const DeviceMesh mesh = line();
  const bool first = mesh.local_rank(0) == 0;
  const Data data =
      first ? Data{{"tokens", at::ones({2}, on(at::kLong))}, {"mask", at::ones({2}, on(at::kFloat))}} : Data{};
  CHECK_THROWS_WITH_AS(broadcast_data({"tokens", "mask"}, data, at::kLong, mesh),
                       doctest::Contains("mask has data type Float which is different than Long"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(broadcast_data({"labels"}, data, at::kLong, mesh), doctest::Contains("no tensor \"labels\""),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(broadcast_data({first ? "tokens" : "mask"}, data, at::kLong, mesh),
                       doctest::Contains("different arguments"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(broadcast_data({"tokens", "tokens"}, data, at::kLong, mesh), doctest::Contains("given twice"),
                       std::invalid_argument);
  // The elements share one address until the tensor is made contiguous.
  const Data huge = first ? Data{{"huge", at::ones({1}, on(at::kFloat)).expand({int64_t{1} << 46})}} : Data{};
  CHECK_THROWS_WITH_AS(broadcast_data({"huge"}, huge, at::kFloat, mesh), doctest::Contains("memory"),
                       std::runtime_error);
  CHECK(same(broadcast_data({"tokens"}, data, at::kLong, mesh).at("tokens"), at::ones({2}, on(at::kLong))));
}
