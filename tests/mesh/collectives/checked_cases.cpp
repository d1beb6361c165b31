#include "tessera/tests/mesh/collectives/checked_cases.h"

#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/mesh/collectives/checked.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/collectives/replicated_check.h"
#include "tessera/mesh/core/mismatch.h"
#include "tessera/mesh/recorder.h"

namespace tessera::testing {
namespace {

template <typename Call>
void check_mismatch(const Call& call, const std::vector<std::string>& parts) {
  std::string text = "(nothing was thrown)";
  try {
    call();
  } catch (const MismatchError& error) {
    text = error.what();
  }
  CAPTURE(text);
  for (const std::string& part : parts) {
    CAPTURE(part);
    CHECK(text.find(part) != std::string::npos);
  }
}

// Names ranks in messages: "ranks [0, 1]", "ranks [2]".
struct Names {
  explicit Names(const World& world) : last(fmt::format("ranks [{}]", world.size() - 1)) {
    std::vector<int64_t> all;
    for (int64_t rank = 0; rank < world.size() - 1; ++rank) all.push_back(rank);
    others = fmt::format("ranks [{}]", fmt::join(all, ", "));
  }
  std::string others;
  std::string last;
};

void check_tensors(const DeviceMesh& mesh, const Names& names, bool odd) {
  const auto sum = [&](const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum) { all_reduce(tensor, mesh, 0, op); };
  check_mismatch([&] { sum(at::ones({4}, odd ? at::kInt : at::kFloat)); },
                 {names.others + ": all_reduce sum of Float (4) on mesh dimension tp, collective 1 of the group",
                  names.last + ": all_reduce sum of Int (4) on mesh dimension tp, collective 1"});
  check_mismatch(
      [&] {
        sum(at::ones(odd ? std::vector<int64_t>{3, 2} : std::vector<int64_t>{2, 3}));
      },
      {names.others + ": all_reduce sum of Float (2, 3)", names.last + ": all_reduce sum of Float (3, 2)"});
  check_mismatch([&] { sum(at::ones({2}), odd ? ReduceOp::kMax : ReduceOp::kSum); },
                 {names.others + ": all_reduce sum", names.last + ": all_reduce max"});
  check_mismatch(
      [&] { odd ? barrier(mesh, 0) : sum(at::ones({2})); },
      {"Checked: the ranks are about to issue different collectives", names.last + ": barrier on mesh dimension tp"});
  check_mismatch([&] { broadcast(at::ones({2}), mesh, 0, odd ? 1 : 0); },
                 {names.others + ": broadcast from coordinate 0", names.last + ": broadcast from coordinate 1"});
}

void check_swapped(const DeviceMesh& mesh, const Names& names, bool odd) {
  const auto reduce = [&](const char* op) {
    const World::Scope scope(mesh.world(), op);
    all_reduce(at::ones({4}), mesh, 0, ReduceOp::kSum);
  };
  check_mismatch(
      [&] { reduce(odd ? "aten::linear" : "aten::mm"); },
      {names.others + ": aten::mm: all_reduce sum of Float (4)", names.last + ": aten::linear: all_reduce sum"});
  check_mismatch([&] { reduce(odd ? "aten::mm" : "aten::linear"); },
                 {names.others + ": aten::linear: all_reduce", names.last + ": aten::mm: all_reduce"});
}

// The layers are equal, and Checked tells them apart by their modules.
void check_swapped_modules(const DeviceMesh& mesh, const Names& names, bool odd) {
  const auto reduce = [&](const std::string& path) {
    const World::Scope scope(mesh.world(), "aten::linear", &path);
    all_reduce(at::ones({4}), mesh, 0, ReduceOp::kSum);
  };
  check_mismatch(
      [&] { reduce(odd ? "down" : "up"); },
      {names.others + ": aten::linear: all_reduce sum of Float (4) on mesh dimension tp, for up,", "for down,"});
  check_mismatch([&] { reduce(odd ? "up" : "down"); }, {"for up,", "for down,"});
}

// The collectives are equal in everything, so Checked cannot tell them apart.
void check_swap_unseen(const DeviceMesh& mesh, bool odd) {
  const auto reduce = [&](const at::Tensor& tensor) { return all_reduce(tensor, mesh, 0, ReduceOp::kSum); };
  const at::Tensor up = at::full({4}, 1.0f), down = at::full({4}, 100.0f);
  const at::Tensor first = reduce(odd ? down : up);
  const at::Tensor second = reduce(odd ? up : down);
  const auto others = static_cast<float>(mesh.size() - 1);
  CHECK(at::equal(first, at::full({4}, others + 100)));
  CHECK(at::equal(second, at::full({4}, 100 * others + 1)));
}

void check_splits(const DeviceMesh& mesh, bool odd) {
  const auto n = static_cast<std::size_t>(mesh.size());
  std::vector<int64_t> send(n, 1), receive(n, 1);
  // The last rank expects 2 elements from rank 0, which sends 1.
  if (odd) receive[0] = 2;
  check_mismatch([&] { all_to_all(at::ones({mesh.size()}), send, receive, mesh, 0); },
                 {fmt::format("all_to_all: rank 0 would send 1 elements to rank {}, which expects 2", n - 1)});
}

}  // namespace

void check_disagreements(const std::shared_ptr<World>& world) {
  const DeviceMesh mesh = init_device_mesh("cpu", {world->size()}, {"tp"}, world);
  const bool odd = world->rank() == world->size() - 1;
  const Names names(*world);
  const Checked checked(mesh);
  CommCounter counter(mesh);
  check_tensors(mesh, names, odd);
  check_swapped(mesh, names, odd);
  check_swapped_modules(mesh, names, odd);
  check_swap_unseen(mesh, odd);
  check_splits(mesh, odd);
  const at::Tensor value = odd ? at::tensor({1, 3}) : at::tensor({1, 2});
  const int64_t before = counter.total();
  check_mismatch([&] { check_replicated(value, mesh, "aten::add"); },
                 {"Checked: aten::add: a plain tensor that counts as replicated is not the same on every rank of {tp: ",
                  names.last + ": Int (2) of content ", names.others + ": Int (2) of content "});
  CHECK(counter.total() == before);
  // Nothing was sent, so the job can continue.
  CHECK(all_reduce(at::ones({1}), mesh, 0, ReduceOp::kSum).item<float>() == static_cast<float>(world->size()));
  // A collective on which the ranks disagreed has ended for the recorder too.
  const std::vector<Record> records = world->recorder().records();
  CHECK(records.size() > 10);
  for (const Record& record : records) {
    CAPTURE(to_string(record));
    CHECK(record.has_ended());
  }
}

void check_agreement(const std::shared_ptr<World>& world) {
  const DeviceMesh mesh = init_device_mesh("cpu", {world->size()}, {"tp"}, world);
  const auto n = static_cast<std::size_t>(world->size());
  const auto me = world->rank();
  const auto run = [&](CommCounter& counter) {
    std::vector<at::Tensor> results;
    results.push_back(all_gather(at::full({2}, me), mesh, 0));
    results.push_back(all_reduce(at::full({3}, me), mesh, 0, ReduceOp::kSum));
    results.push_back(reduce_scatter(at::full({mesh.size(), 2}, me), mesh, 0, ReduceOp::kMax));
    // Uneven: rank i sends i + j elements to rank j.
    std::vector<int64_t> counts;
    int64_t sum = 0;
    for (std::size_t other = 0; other < n; ++other) sum += counts.emplace_back(me + static_cast<int64_t>(other));
    results.push_back(all_to_all(at::full({sum}, me), counts, counts, mesh, 0));
    results.push_back(broadcast(at::full({2}, me), mesh, 0, mesh.size() - 1));
    results.push_back(scatter(at::arange(mesh.size()), at::empty({}, at::kLong), mesh, 0, 0));
    barrier(mesh, 0);
    check_replicated(at::ones({2}), mesh, "aten::add");
    std::vector<std::string> seen;
    for (const CollectiveRecord& record : counter.records())
      seen.push_back(fmt::format("{} {}", record.kind, record.bytes));
    counter.reset();
    return std::make_pair(results, seen);
  };
  CommCounter counter(mesh);
  const Checked off(mesh, false);
  const auto [values, counted] = run(counter);
  const Checked checked(mesh);
  CHECK(Checked::enabled(*world));
  const auto [checked_values, checked_counted] = run(counter);
  CHECK(counted == checked_counted);
  CHECK(counted.size() == (n == 1 ? 0 : 7));
  for (std::size_t i = 0; i < values.size(); ++i) CHECK(at::equal(values[i], checked_values[i]));
}

}  // namespace tessera::testing
