#include <sstream>
#include <stdexcept>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dispatch/explain_op.h"
#include "tessera/dtensor/dtensor.h"

using namespace tessera;

namespace {

at::Tensor sharded(const std::vector<int64_t>& sizes, const Placements& placements,
                   const std::vector<int64_t>& mesh_shape) {
  static const std::shared_ptr<World> world = World::fake(0, 4);
  const DeviceMesh mesh = init_device_mesh("cpu", mesh_shape, {}, world);
  return distribute_tensor(at::empty(sizes), mesh, placements, kNoSource);
}

const OpCandidate& chosen(const OpExplanation& told, std::size_t mesh_dim) {
  for (const OpCandidate& c : told.candidates) {
    if (c.chosen && c.mesh_dim == mesh_dim) return c;
  }
  throw std::logic_error("nothing is chosen");
}

}  // namespace

TEST_CASE("explain_op lists each mesh dimension's candidates with their costs, and the chosen one") {
  const at::Tensor x = sharded({8, 8}, {Shard(0), Shard(1)}, {2, 2});
  const at::Tensor w = sharded({8, 8}, {Replicate(), Shard(0)}, {2, 2});
  const OpExplanation told = explain_op("aten::mm", {x, w});
  CHECK(told.by_rule);
  CHECK(chosen(told, 0).inputs == std::vector<Placement>{Shard(0), Replicate()});
  CHECK(chosen(told, 1).inputs == std::vector<Placement>{Shard(1), Shard(0)});
  CHECK(chosen(told, 1).outputs == std::vector<Placement>{Partial()});
  CHECK(chosen(told, 1).microseconds == 0);
  CHECK(told.outputs == std::vector<Placements>{{Shard(0), Partial()}});
  CHECK(told.steps.empty());
  // The candidates on each of two mesh dimensions are: everything replicated, three factors, two operands pending by
  // sum and by avg.
  CHECK(told.candidates.size() == 2 * (1 + 3 + 4));
  CHECK(told.candidates[0].microseconds > 100);
}

TEST_CASE("explain_op prints candidates, redistributions and results") {
  const at::Tensor x = sharded({8, 8}, {Shard(0)}, {4});
  std::ostringstream out;
  out << explain_op("aten::_softmax", {x, 0, false});
  CHECK(out.str().find("aten::_softmax: by its rule") == 0);
  CHECK(out.str().find("* mesh dimension 0: S(1) -> S(1)") != std::string::npos);
  CHECK(out.str().find("to [S(1)] by") != std::string::npos);
  CHECK(out.str().find("gives [S(1)]") != std::string::npos);
}

TEST_CASE("explain_op says what a candidate would break, and that a view stays where it is") {
  const at::Tensor x = sharded({12, 2}, {Shard(0)}, {4});
  const OpExplanation told = explain_op("aten::view", {x, std::vector<int64_t>{24}});
  CHECK(told.outputs == std::vector<Placements>{{Shard(0)}});
  const OpExplanation written = explain_op("aten::add_.Tensor", {x, sharded({12, 2}, {Shard(1)}, {4})});
  bool refused = false;
  for (const OpCandidate& c : written.candidates)
    refused |= c.refused == "an input that is written would have to be redistributed";
  CHECK(refused);
  CHECK(explain_op("aten::slice.Tensor", {x, 0, 2, 7, 1}).to_string().find("views its piece where it is") !=
        std::string::npos);
}

TEST_CASE("explain_op counts the halos of a convolution among the costs of its candidates") {
  using Ints = std::vector<int64_t>;
  const at::Tensor image = sharded({2, 3, 64, 64}, {Shard(2)}, {4});
  const auto explain = [&](int64_t kernel) {
    const at::Tensor weight = sharded({3, 3, kernel, kernel}, {Replicate()}, {4});
    const Ints same = {kernel / 2, kernel / 2};
    return explain_op("aten::convolution",
                      {image, weight, c10::IValue(), Ints{1, 1}, same, Ints{1, 1}, false, Ints{0, 0}, 1});
  };
  const OpExplanation told = explain(3);
  CHECK(chosen(told, 0).outputs == std::vector<Placement>{Shard(2)});
  // A rank gets at most two rows of 64, for 2 images of 3 channels, at 2000 bytes per microsecond, plus one
  // collective's latency.
  CHECK(chosen(told, 0).microseconds == doctest::Approx(120 + 2.0 * 2 * 3 * 64 * 4 / 2000));
  CHECK(told.steps == std::vector<std::string>{
                          "halos: rows of other ranks (dimension 2: 2 at most) by all_to_all over mesh dimensions 0"});
  CHECK(chosen(explain(1), 0).microseconds == 0);
  CHECK(explain(1).steps == std::vector<std::string>{"halos: no rows of other ranks"});
}

TEST_CASE("explain_op refuses what it cannot explain") {
  const at::Tensor x = sharded({8, 8}, {Shard(0)}, {4});
  CHECK_THROWS_WITH_AS(
      explain_op("aten::nothing", {x}),
      "explain_op: no operator aten::nothing; give namespace, name and overload, as in aten::add.Tensor",
      std::invalid_argument);
  CHECK_THROWS_WITH_AS(explain_op("aten::matmul", {x, x}),
                       doctest::Contains("explain_op: aten::matmul is carried out by other operators"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(explain_op("aten::_foreach_add.Scalar", {std::vector<at::Tensor>{x, x}, 1}),
                       doctest::Contains("acts on the pieces of its lists"), std::invalid_argument);
}
