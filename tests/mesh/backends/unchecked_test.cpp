// Shows what c10d does by itself when ranks disagree, and what its own check finds: the reasons for Checked.

#include <array>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <doctest/doctest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupWrapper.hpp>

namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using MakeBackend = std::function<BackendPtr(const StorePtr&, int)>;
using Body = std::function<at::Tensor(c10d::Backend&, bool odd)>;

constexpr std::chrono::seconds kTimeout(20);

// A rank's result, or the text that was thrown.
struct Outcome {
  at::Tensor value;
  std::string error;
};

BackendPtr gloo_group(const StorePtr& store, int rank) {
  auto options = c10d::ProcessGroupGloo::Options::create(kTimeout);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, 2, options);
}

// Wraps the group as TORCH_DISTRIBUTED_DEBUG=DETAIL does.
BackendPtr detail_mode(const StorePtr& store, int rank) {
  const BackendPtr carrier = gloo_group(c10::make_intrusive<c10d::PrefixStore>("carrier", store), rank);
  const BackendPtr checker = gloo_group(c10::make_intrusive<c10d::PrefixStore>("checker", store), rank);
  return c10::make_intrusive<c10d::ProcessGroupWrapper>(carrier, checker);
}

// Runs `body` on two ranks that are threads, each with its own group; `odd` is true on rank 1.
std::array<Outcome, 2> on_two_ranks(const MakeBackend& make, const Body& body) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  std::array<Outcome, 2> outcomes;
  const auto run = [&](int rank) {
    Outcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    try {
      outcome.value = body(*make(store, rank), rank == 1);
    } catch (const c10::Error& error) {
      outcome.error = error.what_without_backtrace();
    } catch (const std::exception& error) {
      outcome.error = error.what();
    }
  };
  std::thread other([&] { run(1); });
  run(0);
  other.join();
  return outcomes;
}

at::Tensor all_reduce(c10d::Backend& group, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors = {tensor};
  group.allreduce(tensors)->wait();
  return tensor;
}

// Returns ones, as Float on one rank and as Int on the other.
at::Tensor two_dtypes(c10d::Backend& group, bool odd) {
  return all_reduce(group, at::ones({8}, odd ? at::kInt : at::kFloat));
}

// Reduces the gradients of weight and bias, in the other order on the odd rank; returns {weight, bias}.
at::Tensor swapped(c10d::Backend& group, bool odd) {
  at::Tensor weight = at::full({4}, 1.0f), bias = at::full({4}, 100.0f);
  all_reduce(group, odd ? bias : weight);
  all_reduce(group, odd ? weight : bias);
  return at::stack({weight, bias});
}

at::Tensor rows(float first, float second) { return at::stack({at::full({4}, first), at::full({4}, second)}); }

}  // namespace

TEST_CASE("Gloo: ranks that agree get the sum, under DETAIL too") {
  for (const MakeBackend& make : {MakeBackend(gloo_group), MakeBackend(detail_mode)}) {
    const auto outcomes = on_two_ranks(make, [](c10d::Backend& group, bool) { return swapped(group, false); });
    for (const Outcome& outcome : outcomes) {
      CHECK(outcome.error.empty());
      REQUIRE(outcome.value.defined());
      CHECK(at::equal(outcome.value, rows(2, 200)));
    }
  }
}

TEST_CASE("Gloo: a dtype mismatch completes with wrong data") {
  for (const Outcome& outcome : on_two_ranks(gloo_group, two_dtypes)) {
    CHECK(outcome.error.empty());
    REQUIRE(outcome.value.defined());
    CHECK_FALSE(at::equal(outcome.value, at::full({8}, 2, outcome.value.options())));
  }
}

TEST_CASE("Gloo: two swapped all-reduces complete with wrong data") {
  for (const Outcome& outcome : on_two_ranks(gloo_group, swapped)) {
    CHECK(outcome.error.empty());
    REQUIRE(outcome.value.defined());
    CHECK(at::equal(outcome.value, rows(101, 101)));
  }
}

TEST_CASE("DETAIL: a dtype mismatch is found, on every rank") {
  for (const Outcome& outcome : on_two_ranks(detail_mode, two_dtypes)) {
    CAPTURE(outcome.error);
    CHECK(outcome.error.find("Detected mismatch between collectives on ranks") != std::string::npos);
  }
}

TEST_CASE("DETAIL: two swapped all-reduces are missed, and complete with wrong data") {
  for (const Outcome& outcome : on_two_ranks(detail_mode, swapped)) {
    CHECK(outcome.error.empty());
    REQUIRE(outcome.value.defined());
    CHECK(at::equal(outcome.value, rows(101, 101)));
  }
}
