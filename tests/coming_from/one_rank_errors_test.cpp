// An error that only one rank can see ends the call on every rank; in the other libraries the other ranks hang.

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/mappings.h"
#include "tessera/layers/broadcast_data.h"
#include "tessera/layers/sharded_embedding.h"
#include "tessera/mesh/environment.h"
#include "tessera/mesh/in_process.h"
#include "tessera/ops/kernels/sharded_cross_entropy.h"

using namespace tessera;

namespace {

using Body = std::function<void(const DeviceMesh&)>;
using Errors = std::vector<std::string>;

DeviceMesh line(const std::shared_ptr<World>& world) { return init_device_mesh("cpu", {world->size()}, {"tp"}, world); }

// Returns what `body` throws on each of `size` ranks, in their order, or "nothing". A rank that waited would fail at
// the time limit.
Errors errors_of(int64_t size, const Body& body) {
  Errors errors(static_cast<std::size_t>(size), "nothing");
  const auto run = [&](const std::shared_ptr<World>& world) {
    try {
      body(line(world));
    } catch (const std::exception& error) {
      errors[static_cast<std::size_t>(world->rank())] = error.what();
      throw;
    }
  };
  try {
    run_in_process(size, run, {.timeout = std::chrono::seconds(30)});
  } catch (const std::runtime_error&) {
    return errors;
  }
  return errors;
}

void check_every_rank(const Errors& errors, const std::string& text) {
  for (std::size_t rank = 0; rank < errors.size(); ++rank) {
    CAPTURE(rank);
    CAPTURE(errors[rank]);
    CHECK(errors[rank].find(text) != std::string::npos);
    CHECK(errors[rank].find("timed out") == std::string::npos);
  }
}

// Checks that every rank throws the text itself, not because another rank did, and that the ranks can then go on.
void check_and_go_on(int64_t size, const Body& wrong, const std::string& text) {
  Errors own(static_cast<std::size_t>(size), "nothing");
  const Errors others = errors_of(size, [&](const DeviceMesh& mesh) {
    try {
      wrong(mesh);
    } catch (const std::invalid_argument& error) {
      own[static_cast<std::size_t>(mesh.local_rank(0))] = error.what();
    }
    const at::Tensor sum = reduce_from_region(at::ones({2}, at::kDouble), mesh);
    if (!at::equal(sum, at::full({2}, static_cast<double>(size), at::kDouble))) throw std::runtime_error("another sum");
  });
  check_every_rank(own, text);
  check_every_rank(others, "nothing");
}

// Says whether this is the last rank, which gets the wrong argument.
bool is_wrong(const DeviceMesh& mesh) { return mesh.local_rank(0) == mesh.size() - 1; }

void take_loss(const DeviceMesh& mesh) {
  const at::Tensor target = at::full({3}, is_wrong(mesh) ? 99 : 1, at::kLong);
  sharded_cross_entropy(at::ones({3, 4}, at::kDouble), target, mesh);
}

void look_up(const DeviceMesh& mesh) {
  const at::Tensor ids = at::full({3}, is_wrong(mesh) ? 99 : 1, at::kLong);
  sharded_embedding(ids, at::ones({4, 2}, at::kDouble), mesh);
}

void bring_together(const DeviceMesh& mesh) {
  const at::Tensor piece = at::ones({is_wrong(mesh) ? 5 : 2, 3}, at::kDouble);
  from_local(piece, mesh, {Shard(0)}, {.shape = std::vector<int64_t>{2 * mesh.size(), 3}, .check = true});
}

void gather(const DeviceMesh& mesh) { gather_from_region(at::ones({2, is_wrong(mesh) ? 5 : 3}, at::kDouble), mesh); }

}  // namespace

TEST_CASE("one_rank_errors") {
  for (const int64_t n : {1, 2, 3, 4}) {
    CAPTURE(n);
    // The original looks at dtypes on the first rank only, which throws before it sends.
    const auto send = [](at::ScalarType dtype, const std::string& key) {
      return [=](const DeviceMesh& mesh) {
        std::map<std::string, at::Tensor> data;
        if (mesh.local_rank(0) == 0) data.emplace("mask", at::ones({2}, at::kDouble));
        broadcast_data({key}, data, dtype, mesh);
      };
    };
    check_and_go_on(n, send(at::kLong, "mask"), "mask has data type Double which is different than Long");
    check_and_go_on(n, send(at::kDouble, "tokens"), "there is no tensor \"tokens\"");
    check_every_rank(errors_of(n, send(at::kDouble, "mask")), "nothing");
    const auto send_sparse = [](const DeviceMesh& mesh) {
      std::map<std::string, at::Tensor> data;
      if (mesh.local_rank(0) == 0) data.emplace("mask", at::eye(2, at::kDouble).to_sparse());
      broadcast_data({"mask"}, data, at::kDouble, mesh);
    };
    check_and_go_on(n, send_sparse, "\"mask\" is sparse; give a dense tensor with values");
    check_and_go_on(n, bring_together, fmt::format("rank {} has a piece [5, 3]", n - 1));
    // A value that must be the same on every rank is not: the rank that sees it tells the others.
    check_every_rank(errors_of(n, take_loss), "target 99 is out of bounds");
    check_every_rank(errors_of(n, look_up), "id 99 is outside the table");
    // Checked finds it before anything is sent; ranks that are threads find it when they exchange arguments.
    const bool compared = checked_by(process_environment());
    const std::string text = compared ? "about to issue different collectives"
                                      : fmt::format("rank {} gives rank 0 80 elements of Byte", n - 1);
    if (n > 1) check_every_rank(errors_of(n, gather), text);
  }
}

TEST_CASE("a bad id or target of one replica ends the others, which other slices of the mesh have") {
  const auto check = [](const std::function<void(int64_t value, const DeviceMesh& tp)>& call, const std::string& text) {
    for (const int64_t size : {2, 4}) {
      const Errors errors = errors_of(size, [&](const DeviceMesh& all) {
        const DeviceMesh mesh = init_device_mesh("cpu", {2, size / 2}, {"dp", "tp"}, all.world_ptr());
        try {
          call(mesh.local_rank("dp") == 0 ? 99 : 1, mesh["tp"]);
        } catch (const std::invalid_argument&) {
          return;  // the replica leaves this batch out
        }
        reduce_from_region(at::ones({2}, at::kDouble), mesh["dp"]);
      });
      for (int64_t rank = size / 2; rank < size; ++rank) {
        CAPTURE(errors[static_cast<std::size_t>(rank)]);
        CHECK(errors[static_cast<std::size_t>(rank)].find(text) != std::string::npos);
      }
    }
  };
  check(
      [](int64_t value, const DeviceMesh& tp) {
        const ShardedEmbeddingOptions options = {.num_embeddings = 4 * tp.size()};
        sharded_embedding(at::full({3}, value, at::kLong), at::ones({4, 2}, at::kDouble), tp, options);
      },
      "id 99 is outside the table");
  check(
      [](int64_t value, const DeviceMesh& tp) {
        const CrossEntropyOptions options = {.classes = 4 * tp.size()};
        sharded_cross_entropy(at::ones({3, 4}, at::kDouble), at::full({3}, value, at::kLong), tp, options);
      },
      "target 99 is out of bounds");
}
