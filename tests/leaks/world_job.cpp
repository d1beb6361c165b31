// Is a rank that makes a World and a mesh, reduces, redistributes and ends, for leaks_test. With the argument "lose" it
// also loses memory.

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string_view>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/world.h"

using namespace tessera;

namespace {

// A pointer to one of them may stay in a register or on the stack, where LeakSanitizer would find it.
[[gnu::noinline]] void lose_memory() {
  for (int64_t i = 0; i < 16; ++i) {
    auto* lost = new std::vector<int64_t>(4, i);
    asm volatile("" : "+r"(lost));
  }
}

bool run() {
  const std::shared_ptr<World> world = World::from_environment();
  const DeviceMesh mesh = init_device_mesh("cpu", {world->size()}, {"m"}, world);
  const at::Tensor sum = all_reduce(at::ones({4}), mesh, 0, ReduceOp::kSum);
  const at::Tensor numbers = at::arange(10, at::kDouble);
  const at::Tensor whole = redistribute(distribute_tensor(numbers, mesh, {Shard(0)}), {Replicate()});
  return sum.equal(at::full({4}, world->size(), at::kFloat)) && to_local(whole).equal(numbers);
}

}  // namespace

int main(int argc, char** argv) {
  const bool right = run();
  fmt::print("the results are {}\n", right ? "right" : "wrong");
  std::fflush(stdout);  // a process whose leaks were found ends without this
  if (argc > 1 && std::string_view(argv[1]) == "lose") lose_memory();
  return right ? 0 : 1;
}
