// Is a rank of a job on several hosts, for tests/hosts. The first argument says what it does. It prints "started",
// "begun" after the first collective over all ranks, "done" at the end, and "error: TEXT" when it gets an error.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/device_mesh.h"

using namespace tessera;
using Clock = std::chrono::steady_clock;

namespace {

void say(const std::string& text) {
  fmt::print("{}\n", text);
  std::fflush(stdout);
}

// Reduces a megabyte over all ranks, again and again, and checks every sum.
void reduce_for(const DeviceMesh& mesh, double seconds) {
  const auto size = static_cast<double>(mesh.world().size());
  const at::Tensor ones = at::ones({1 << 17}, at::kDouble);
  const auto start = Clock::now();
  int64_t rounds = 0;
  double go_on = 1;
  while (go_on > 0) {
    const at::Tensor sum = all_reduce(ones, mesh, 0, ReduceOp::kSum);
    if (!at::all(sum == size).item<bool>()) throw std::runtime_error("a wrong sum");
    if (rounds++ == 0) say("begun");
    // The ranks end in the same round: when one of them is at its end.
    go_on = std::chrono::duration<double>(Clock::now() - start).count() < seconds ? 1 : 0;
    go_on = all_reduce(at::full({1}, go_on, at::kDouble), mesh, 0, ReduceOp::kMin).item<double>();
  }
  say(fmt::format("done: {} rounds of 1 MiB over {} ranks", rounds, mesh.world().size()));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  say("started");
  try {
    const DeviceMesh mesh = init_device_mesh("cpu", {World::from_environment()->size()}, {"all"});
    reduce_for(mesh, std::stod(argv[1]));
  } catch (const std::exception& error) {
    say(fmt::format("error: {}", error.what()));
    return 1;
  }
  return 0;
}
