// Tests that errors which only one rank can see reach every rank within five seconds.

#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/placement/reduction.h"
#include "tessera/tests/dtensor/thrown.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
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

// Checks that what rank 1 of two ranks throws in `body` ends rank 0 soon too, with that text.
void check_told(const std::function<void(const DeviceMesh& mesh, bool odd)>& body, const std::string& text,
                const std::string& where) {
  CAPTURE(text);
  const auto start = std::chrono::steady_clock::now();
  const std::vector<std::string> texts = thrown(body);
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
  CAPTURE(texts[0]);
  CAPTURE(texts[1]);
  CHECK(contains(texts[1], text));
  CHECK(contains(texts[0], "rank 1 failed in " + where));
  CHECK(contains(texts[0], text));
}

// Stands for a user's reduction that fails on one rank, in a method that has to reduce or whose result is reduced.
class Failing final : public Reduction {
 public:
  enum class Method { kNone, kToTerm, kDerivative };
  explicit Failing(Method fails) : Reduction("failing", ReduceOp::kSum), fails_(fails) {}

  at::Tensor to_term(const at::Tensor& piece) const override {
    if (fails_ == Method::kToTerm) throw std::runtime_error("this piece has no term");
    return piece;
  }
  at::Tensor derivative(const at::Tensor& piece, const Peers& peers) const override {
    if (fails_ == Method::kDerivative) throw std::runtime_error("this piece has no derivative");
    return peers.all_reduce(at::ones_like(piece), ReduceOp::kMax);
  }

 private:
  const Method fails_;
};

// Gives memory as the allocator that was there before does, but none to a thread that has an OutOfMemory.
class ScarceAllocator final : public c10::Allocator {
 public:
  static ScarceAllocator& instance() {
    static ScarceAllocator* const made = new ScarceAllocator();  // tensors may outlive static destruction
    return *made;
  }
  c10::DataPtr allocate(std::size_t bytes) override {
    TORCH_CHECK(!refuses, "DefaultCPUAllocator: can't allocate memory: Error code 12 (Cannot allocate memory)");
    return before_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return before_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { before_->copy_data(to, from, bytes); }

  static inline thread_local bool refuses = false;

 private:
  ScarceAllocator() { c10::SetAllocator(c10::kCPU, this, /*priority=*/255); }
  c10::Allocator* const before_ = c10::GetAllocator(c10::kCPU);
};

// While it lives, this thread gets no memory, if `here`.
class OutOfMemory {
 public:
  explicit OutOfMemory(bool here) { ScarceAllocator::refuses = here; }
  ~OutOfMemory() { ScarceAllocator::refuses = false; }
  OutOfMemory(const OutOfMemory&) = delete;
  OutOfMemory& operator=(const OutOfMemory&) = delete;
};

Placement failing_if(bool odd, Failing::Method method) {
  return Partial(std::make_shared<const Failing>(odd ? method : Failing::Method::kNone));
}

}  // namespace

TEST_CASE("an error of a user's reduction on one rank ends the others") {
  check_told([](const DeviceMesh& mesh,
                bool odd) { full_tensor(from_local(sample({4}), mesh, {failing_if(odd, Failing::Method::kToTerm)})); },
             "this piece has no term", "forming what a collective sends");
  check_told(
      [](const DeviceMesh& mesh, bool odd) {
        const Placement pending = failing_if(odd, Failing::Method::kDerivative);
        full_tensor(from_local(leaf(sample({4})), mesh, {pending})).sum().backward();
      },
      "this piece has no derivative", "from_local");
}

TEST_CASE("a piece or a mask that from_local refuses on one rank ends the others") {
  const at::Tensor good = sample({3, 2});
  const auto check = [&](const at::Tensor& odd_one, const Placement& placement, const std::string& text) {
    check_told(
        [&](const DeviceMesh& mesh, bool odd) { full_tensor(from_local(odd ? odd_one : good, mesh, {placement})); },
        text, "from_local");
  };
  check(sample({3}), S1, "S(1) is outside a tensor of 1 dimensions");
  check(at::Tensor(), S0, "the local tensor is undefined");
  check(good.to_sparse(), S0, "the tensor is of layout Sparse");
  check(good.to(at::kLong), Partial(ReduceOp::kAvg), "avg of Long is not defined");
  check_told(
      [&](const DeviceMesh& mesh, bool odd) {
        FromLocalOptions options;
        options.mask = at::ones({odd ? 4 : 3, 2}, on(at::kBool));
        full_tensor(from_local(good, mesh, {MaskedPartial()}, options));
      },
      "a mask of Bool [4, 2] for a piece [3, 2]", "from_local");
}

TEST_CASE("counts and a piece that do not fit on one rank alone end the others") {
  const std::vector<int64_t> ones = {1, 1};
  const auto check = [&](const std::function<void(const at::Tensor& piece, const DeviceMesh& mesh)>& call,
                         const std::string& kind) {
    check_told([&](const DeviceMesh& mesh, bool odd) { call(at::ones({odd ? 3 : 2}), mesh); },
               kind + ": input of shape (3)", kind);
  };
  check([&](const at::Tensor& piece, const DeviceMesh& mesh) { all_to_all(piece, ones, ones, mesh, 0); }, "all_to_all");
  check([&](const at::Tensor& piece, const DeviceMesh& mesh) { permute(piece, ones, ones, mesh, 0); }, "permute");
  check([](const at::Tensor& piece, const DeviceMesh& mesh) { all_gather(piece, {2, 2}, mesh, 0); }, "all_gather");
  check([&](const at::Tensor& piece, const DeviceMesh& mesh) { reduce_scatter(piece, ones, mesh, 0, ReduceOp::kSum); },
        "reduce_scatter");
  check_told(
      [&](const DeviceMesh& mesh, bool odd) {
        all_gather(at::ones({1}), odd ? std::vector<int64_t>{1, 1, 1} : ones, mesh, 0);
      },
      "all_gather: counts [1, 1, 1] for 2 ranks", "all_gather");
}

TEST_CASE("an operator for which one rank lacks memory ends the others") {
  ScarceAllocator::instance();  // before there are threads that allocate
  // The first goes by the boxed kernel, the second by the unboxed one.
  for (const bool unboxed : {false, true}) {
    CAPTURE(unboxed);
    check_told(
        [&](const DeviceMesh& mesh, bool odd) {
          const at::Tensor x = spread(sample({4, 3}), mesh, {S0});
          const auto run = [&] { return unboxed ? at::sigmoid(x) : at::erfinv(x); };
          run();  // decides how, for which it makes small tensors
          at::Tensor y;
          {
            const OutOfMemory guard(odd);
            y = run();
          }
          full_tensor(y);
        },
        "Cannot allocate memory", unboxed ? "aten::sigmoid" : "aten::erfinv");
  }
}

TEST_CASE("distribute_tensor and redistribute_to, for which one rank lacks memory, end the others") {
  ScarceAllocator::instance();  // before there are threads that allocate
  const at::Tensor whole = sample({4, 3});
  const auto check = [&](const std::string& where, const std::function<at::Tensor(const DeviceMesh&, bool odd)>& run) {
    check_told(
        [&](const DeviceMesh& mesh, bool odd) {
          run(mesh, odd);
          barrier(mesh, 0);
        },
        "Cannot allocate memory", where);
  };
  for (const Placement& placement : {S0, R}) {
    for (const int64_t source : {kNoSource, kMeshFirstRank}) {
      check("distribute_tensor", [&](const DeviceMesh& mesh, bool odd) {
        distribute_tensor(whole, mesh, {placement}, source);
        const OutOfMemory guard(odd);
        return distribute_tensor(whole, mesh, {placement}, source);
      });
    }
  }
  check("redistribute_to", [&](const DeviceMesh& mesh, bool odd) {
    const DeviceMesh turned(mesh.world_ptr(), mesh.device_type(), Mesh({2, 1}, {"a", "b"}));
    const at::Tensor x = distribute_tensor(whole, mesh, {R});
    redistribute_to(x, turned, {R, S0});
    redistribute_to(x, turned, {S1, R});
    const OutOfMemory guard(odd);
    return redistribute_to(x, turned, {S1, R});
  });
}

TEST_CASE("an exception of an observer on one rank ends the others") {
  check_told(
      [](const DeviceMesh& mesh, bool odd) {
        const auto token = mesh.world().observe([&](const CollectiveRecord&) {
          if (odd) throw std::runtime_error("this observer has no space");
        });
        full_tensor(spread(sample({4, 3}), mesh, {S0}));
      },
      "this observer has no space", "redistribute");
}

TEST_CASE("what every rank sees to be wrong is thrown by each, and the job goes on") {
  const at::Tensor good = sample({3, 2});
  struct Wrong {
    Placements placements;
    FromLocalOptions options;
  };
  const std::vector<Wrong> all = {
      {{S0, S0}, {}},
      {{S0}, {.stride = std::vector<int64_t>{2, 1}}},
      {{S0}, {.shape = std::vector<int64_t>{6}, .stride = std::vector<int64_t>{2, 1}}},
      {{S1}, {.shape = std::vector<int64_t>{6}}},
      {{S0}, {.shape = std::vector<int64_t>{6, 2}, .grad_placements = Placements{S1}}},
      {{R}, {.grad_placements = Placements{R, R}}},
  };
  for (const std::string& text : thrown([&](const DeviceMesh&mesh, bool) {
         int refused = 0;
         for (const Wrong& each : all) {
           try {
             from_local(good, mesh, each.placements, each.options);
           } catch (const std::invalid_argument&) {
             ++refused;
           }
         }
         CHECK(refused == static_cast<int>(all.size()));
         CHECK(full_tensor(from_local(good, mesh, {S0})).size(0) == 6);
       })) {
    CHECK(text == "");
  }
}

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
  const at::Tensor fits = at::ones({2, 4}).requires_grad_(mesh.local_rank(0) == 1);
  CHECK(contains(thrown_soon([&] { from_local(fits, mesh, {S0}, options); }),
                 "a piece that requires a gradient where the others' do"));
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
