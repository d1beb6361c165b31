// Checks pieces that do not fit, of which only one rank may know: every rank gets the error.

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/layers/sharded_embedding.h"
#include "tessera/layers/sharded_linear.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/in_process.h"
#include "tessera/ops/kernels/sharded_cross_entropy.h"
#include "tessera/tests/dtensor/thrown.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/skip.h"
#include "tessera/tests/harness/text.h"

using namespace tessera;
using tessera::testing::contains;
using tessera::testing::device;
using tessera::testing::device_name;
using tessera::testing::on;

namespace {

// Returns what each of two ranks throws, in `body` or in the collective after it.
std::vector<std::string> thrown_till_after(const std::function<void(const DeviceMesh& mesh, bool odd)>& body) {
  return testing::thrown([&](const DeviceMesh& mesh, bool odd) {
    body(mesh, odd);
    all_reduce(at::ones({1}, on(at::kFloat)), mesh, 0, ReduceOp::kSum);
  });
}

// Only rank 1 has the error.
void check_both_hear(const std::string& who, const std::string& why,
                     const std::function<void(const DeviceMesh& mesh, bool odd)>& body) {
  const std::vector<std::string> texts = thrown_till_after(body);
  CAPTURE(texts[0]);
  CAPTURE(texts[1]);
  CHECK(contains(texts[1], who + ": "));
  CHECK(contains(texts[1], why));
  CHECK(contains(texts[0], fmt::format("rank 1 failed in {}", who)));
  CHECK(contains(texts[0], why));
}

// A check that fails on a GPU fails every later call of the process.
constexpr const char* kCheckedLater = "a GPU checks classes and ids later, and then computes nothing more";

}  // namespace

TEST_CASE("one_rank_errors: pieces of a linear layer that one rank alone has wrong") {
  const at::Tensor x = at::ones({4, 5}, on(at::kFloat));
  const auto linear = [&](const char* why, const auto& options_of, int64_t in, int64_t bias, at::ScalarType dtype) {
    check_both_hear("sharded_linear", why, [&](const DeviceMesh& mesh, bool odd) {
      sharded_linear(x, at::ones({3, odd ? in : 5}, on(odd ? dtype : at::kFloat)),
                     at::ones({odd ? bias : 3}, on(at::kFloat)), mesh, options_of(odd));
    });
  };
  const auto plain = [](bool) { return ShardedLinearOptions{.reduce_input_gradient = true}; };
  linear("they are [*, in] and [out, in]", plain, 4, 3, at::kFloat);
  linear("bias Float [4] for weight Float [3, 5]", plain, 5, 4, at::kFloat);
  linear("they have one dtype", plain, 5, 3, at::kDouble);
  linear(
      "main_grad is Double [3, 5], the weight Float",
      [](bool odd) {
        return ShardedLinearOptions{.main_grad = at::zeros({3, 5}, on(odd ? at::kDouble : at::kFloat))};
      },
      5, 3, at::kFloat);
  check_both_hear("sharded_linear", "no piece of a sequence of 6", [&](const DeviceMesh& mesh, bool odd) {
    sharded_linear(at::ones({odd ? 2 : 3, 5}, on(at::kFloat)), at::ones({3, 5}, on(at::kFloat)), {}, mesh,
                   {.sequence_parallel = true, .sequence_size = 6});
  });
}

TEST_CASE("one_rank_errors: a piece of a table that one rank alone has wrong") {
  check_both_hear("sharded_embedding", "weight is [5, 3] on this rank, whose part of the table [8, 3] is [4, 3]",
                  [](const DeviceMesh& mesh, bool odd) {
                    sharded_embedding(at::zeros({2}, on(at::kLong)), at::ones({odd ? 5 : 4, 3}, on(at::kFloat)), mesh,
                                      {.num_embeddings = 8});
                  });
}

TEST_CASE(
    "one_rank_errors: a table of one dimension, and an id or padding to some ranks alone, which counted by their own") {
  const auto ids = [](int64_t id) { return at::full({2}, id, on(at::kLong)); };
  check_both_hear("sharded_embedding", "weight [8]; it is [rows, columns]", [&](const DeviceMesh& mesh, bool odd) {
    sharded_embedding(ids(0), odd ? at::ones({8}, on(at::kFloat)) : at::ones({4, 3}, on(at::kFloat)), mesh,
                      {.num_embeddings = 8});
  });
  check_both_hear("sharded_embedding", "padding_idx 4 must be within num_embeddings, 4",
                  [&](const DeviceMesh& mesh, bool odd) {
                    sharded_embedding(ids(0), at::ones({odd ? 2 : 3, 3}, on(at::kFloat)), mesh, {.padding_idx = 4});
                  });
  if (device().is_cuda()) return;  // see kCheckedLater
  check_both_hear("sharded_embedding", "id 4 is outside the table of 4 rows; give options.num_embeddings if",
                  [&](const DeviceMesh& mesh, bool odd) {
                    sharded_embedding(ids(4), at::ones({odd ? 2 : 3, 3}, on(at::kFloat)), mesh);
                  });
  check_both_hear("sharded_embedding", "id 3 is outside the table of 3 rows", [&](const DeviceMesh& mesh, bool odd) {
    sharded_embedding(ids(3), at::ones({odd ? 3 : 4, 3}, on(at::kFloat)), mesh, {.cut = EmbeddingCut::kWidth});
  });
}

TEST_CASE("one_rank_errors: logits of one rank that do not fit the target, or are no numbers with a fraction") {
  const at::Tensor target = at::zeros({2}, on(at::kLong));
  check_both_hear("sharded_cross_entropy", "logits [3, 4] and target [2]", [&](const DeviceMesh& mesh, bool odd) {
    sharded_cross_entropy(at::ones({odd ? 3 : 2, 4}, on(at::kFloat)), target, mesh);
  });
  check_both_hear("sharded_cross_entropy", "logits of Int", [&](const DeviceMesh& mesh, bool odd) {
    sharded_cross_entropy(at::ones({2, 4}, on(odd ? at::kInt : at::kFloat)), target, mesh);
  });
}

TEST_CASE("one_rank_errors: classes that one rank alone has wrong") {
  const at::Tensor target = at::zeros({2}, on(at::kLong));
  check_both_hear("sharded_cross_entropy", "3 of 8 classes here, of which this rank has 4",
                  [&](const DeviceMesh& mesh, bool odd) {
                    sharded_cross_entropy(at::ones({2, odd ? 3 : 4}, on(at::kFloat)), target, mesh, {.classes = 8});
                  });
  check_both_hear("sharded_cross_entropy", "options.classes is their number", [&](const DeviceMesh& mesh, bool odd) {
    sharded_cross_entropy(at::ones({2, odd ? 0 : 4}, on(at::kFloat)), target, mesh,
                          {.label_smoothing = 0.1, .smoothing = SmoothingFormula::kMegatron});
  });
}

TEST_CASE("one_rank_errors: classes that ranks count each by their own, and that are uneven") {
  if (device().is_cuda()) TESSERA_SKIP(kCheckedLater);
  const at::Tensor target = at::zeros({2}, on(at::kLong));
  const std::vector<std::string> texts = thrown_till_after([&](const DeviceMesh& mesh, bool odd) {
    sharded_cross_entropy(at::ones({2, odd ? 2 : 3}, on(at::kFloat)), target, mesh);
  });
  for (const std::string& text : texts) {
    CAPTURE(text);
    CHECK(contains(text, "of 5 on all 2 ranks; uneven ones need options.classes"));
  }
}

TEST_CASE("one_rank_errors: a target that is a class to some ranks alone, which counted by their own") {
  if (device().is_cuda()) TESSERA_SKIP(kCheckedLater);
  const at::Tensor target = at::full({2}, 4, on(at::kLong));
  check_both_hear("sharded_cross_entropy", "target 4 is out of bounds: there are 4 classes",
                  [&](const DeviceMesh& mesh, bool odd) {
                    sharded_cross_entropy(at::ones({2, odd ? 2 : 3}, on(at::kFloat)), target, mesh);
                  });
}

TEST_CASE("one_rank_errors: a rank that has nothing of an uneven table cannot tell how large it is") {
  check_both_hear("sharded_embedding", "for uneven parts give options.embedding_dim",
                  [](const DeviceMesh& mesh, bool odd) {
                    sharded_embedding(at::zeros({2}, on(at::kLong)), at::ones({4, odd ? 0 : 3}, on(at::kFloat)), mesh,
                                      {.cut = EmbeddingCut::kWidth});
                  });
}

TEST_CASE("one_rank_errors: a target that is no class in one part of a batch alone ends the job with that text") {
  if (device().is_cuda()) TESSERA_SKIP(kCheckedLater);
  std::vector<std::string> texts(4);
  run_in_process(4, [&](const std::shared_ptr<World>& world) {
    try {  // some ranks may still make groups when others fail
      const DeviceMesh mesh = init_device_mesh(device_name(), {2, 2}, {"dp", "tp"}, world);
      const at::Tensor logits = from_local(at::ones({2, 3}, on(at::kFloat)), mesh, {Shard(0), Shard(1)});
      const at::Tensor target =
          from_local(at::full({2}, world->rank() >= 2 ? 9 : 1, on(at::kLong)), mesh, {Shard(0), Replicate()});
      full_tensor(at::cross_entropy_loss(logits, target));
    } catch (const std::exception& error) {
      texts[static_cast<std::size_t>(world->rank())] = error.what();
    }
  });
  for (const std::string& text : texts) {
    CAPTURE(text);
    CHECK(contains(text, "target 9 is out of bounds: there are 6 classes"));
  }
}

TEST_CASE("a rank outside the mesh gets an error that says so") {
  run_in_process(2, [](const std::shared_ptr<World>& world) {
    const DeviceMesh first(world, device().type(), Mesh({1}, {"tp"}, {0}));
    const at::Tensor x = at::ones({2, 4}, on(at::kFloat)), ids = at::zeros({2}, on(at::kLong));
    const std::vector<std::function<void()>> calls = {[&] {
                                                        sharded_linear(x, at::ones({3, 4}, on(at::kFloat)), {}, first);
                                                      },
                                                      [&] { sharded_embedding(ids, x, first); },
                                                      [&] { sharded_cross_entropy(x, ids, first); }};
    for (const auto& call : calls) {
      if (first.is_member()) {
        CHECK_NOTHROW(call());
      } else {
        CHECK_THROWS_WITH_AS(call(), doctest::Contains("does not have this rank"), std::invalid_argument);
      }
    }
  });
}
