// Tests that the memory of a job that never makes the same layout twice stays bounded.

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/in_process.h"
#include "tessera/mesh/world.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/sanitizers.h"

using namespace tessera;

// AddressSanitizer has it. It is declared in sanitizer/allocator_interface.h, which some installations do not have.
extern "C" std::size_t __sanitizer_get_current_allocated_bytes();

namespace {

// Returns the memory of this process in KiB: what is resident. AddressSanitizer keeps freed memory resident for a
// while, so there it returns what is in use.
int64_t memory() {
  if constexpr (testing::kAddressSanitizer)
    return static_cast<int64_t>(__sanitizer_get_current_allocated_bytes() / 1024);
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t size = 0;
    if (word == "VmRSS:" && status >> size) return size;
  }
  FAIL("/proc/self/status has no VmRSS");
  return 0;
}

constexpr int64_t kSize = 400;

// Returns the n-th of a million shardings.
std::vector<int64_t> sizes(int64_t n) {
  const int64_t a = n % 100, b = n / 100 % 100, c = n / 10'000;
  return {a, b, c, kSize - a - b - c};
}

}  // namespace

TEST_CASE("a million different ragged shardings, one in twenty redistributed, leave memory flat") {
  const DeviceMesh mesh = init_device_mesh("cpu", {4}, {}, World::fake(0, 4));
  const at::Tensor rows = at::zeros({kSize});
  const auto use = [&](int64_t n) {
    const Placements ragged = {RaggedShard(0, sizes(n))};
    const at::Tensor t =
        from_local(rows.narrow(0, 0, sizes(n)[0]), mesh, ragged, {.shape = std::vector<int64_t>{kSize}});
    if (n % 20 == 0) redistribute(redistribute(t, {Shard(0)}), ragged);
    if (n % 500 == 0) t.add(t);  // an operator's decision
  };
  for (int64_t n = 0; n < 100'000; ++n) use(n);
  const int64_t before = memory();
  for (int64_t n = 100'000; n < 1'000'000; ++n) use(n);
  const int64_t after = memory();
  MESSAGE("memory: ", before, " KiB after 100,000, ", after, " KiB after 1,000,000");
  CHECK(after - before < 4096);
}

TEST_CASE("three thousand redistributions, more than are cached, are right; so are the first ones when repeated") {
  run_in_process(2, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {}, world);
    const auto check = [&](int64_t rows) {
      CAPTURE(rows);
      const at::Tensor whole = testing::whole_numbers({rows, 3}, at::kFloat, rows);
      const at::Tensor moved = redistribute(testing::spread(whole, mesh, {Shard(0)}), {Shard(1)});
      CHECK(testing::same(to_local(moved), testing::piece_of(whole, mesh, {Shard(1)})));
    };
    for (int64_t rows = 0; rows < 3000; ++rows) check(rows);
    for (int64_t rows = 0; rows < 100; ++rows) check(rows);
  });
}
