// What a mesh of 4,096 ranks costs one of them: 64 x 8 x 8 in a world that communicates nothing.

#include <functional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "tessera/bench/measure.h"
#include "tessera/mesh/device_mesh.h"

namespace {

using tessera::DeviceMesh;

void show(const std::string& name, const std::function<void()>& body, int calls) {
  std::vector<double> rounds;
  for (int round = 0; round < 20; ++round) rounds.push_back(tessera::bench::time_calls(body, calls));
  const tessera::bench::Figure figure = tessera::bench::figure_of(rounds);
  fmt::print("{:<40} {:>10.3f} us  ({:.3f} to {:.3f})\n", name, figure.median, figure.low, figure.high);
}

}  // namespace

int main() {
  const auto world = tessera::World::fake(1234, 4096);
  const auto build = [&] { return tessera::init_device_mesh("cpu", {64, 8, 8}, {"dp", "pp", "tp"}, world); };
  show(
      "build", [&] { build(); }, 20);
  const DeviceMesh mesh = build();
  show(
      "build again, while the first lives", [&] { build(); }, 20);
  show(
      "slice: mesh[\"tp\"]", [&] { mesh["tp"]; }, 100);
  show(
      "merged({0, 2}), again",
      [&] {
        mesh.merged({0, 2});
      },
      10000);
  const std::vector<int64_t> dims = {0, 2};
  show(
      "merged(dims), again", [&] { mesh.merged(dims); }, 10000);
  show(
      "coordinate_of", [&] { mesh.mesh().coordinate_of(4000); }, 10000);
  fmt::print("process groups made: {}\n", world->group_count());
}
