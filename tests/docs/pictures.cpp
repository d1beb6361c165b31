// Prints what docs/seeing.md shows, and writes its pictures if it is given their folder:
//   bazel run //tests/docs:pictures -- $PWD/docs/pictures
// Its time line is of real steps, so that it differs in each run; the other pictures do not.

#include <fstream>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>

#include <torch/torch.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/explain.h"
#include "tessera/inspect/timeline.h"
#include "tessera/inspect/trace.h"
#include "tessera/inspect/visualize.h"
#include "tessera/mesh/in_process.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/docs/mlp.h"

namespace {

void write(const std::string& folder, const std::string& name, const std::string& svg) {
  if (folder.empty()) return;
  std::ofstream file(folder + "/" + name);
  file << svg;
  if (!file.flush()) throw std::runtime_error("cannot write " + folder + "/" + name);
}

void layouts(const std::string& folder) {
  const std::shared_ptr<tessera::World> world = tessera::World::fake(/*rank=*/0, /*size=*/4);
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world);
  const at::Tensor x = tessera::distribute_tensor(torch::ones({5, 12}), mesh, {tessera::Shard(0), tessera::Shard(1)});
  std::cout << tessera::visualize(x);
  write(folder, "layout.svg", tessera::visualize_svg(x));

  std::cout << tessera::visualize({8}, tessera::Mesh({2, 2}), {tessera::BlockCyclic(0, 2), tessera::Partial()});

  const tessera::Plan plan = tessera::explain(x, {tessera::Shard(1), tessera::Replicate()}).plan;
  std::cout << tessera::visualize(plan);
  write(folder, "plan.svg", tessera::visualize_svg(plan));
}

// Trains on one rank of two, and returns the time line of both on the first.
std::string steps(const std::shared_ptr<tessera::World>& world) {
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {2}, {"tp"}, world);
  Mlp model;
  auto tp = tessera::parallelize_module(model, mesh,
                                        {{"up", tessera::ColwiseParallel()}, {"down", tessera::RowwiseParallel()}});
  torch::optim::AdamW optimizer(model->parameters());
  const at::Tensor input = torch::ones({512, 16});
  for (int step = 0; step < 3; ++step) {
    if (step == 1) world->recorder().restart(1024);  // first calls take longer: that is no step to show
    const tessera::Recorder::Span span(world->recorder(), "step");
    tp(input).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  return tessera::timeline_svg(tessera::gather_records(mesh), {.title = "two steps on two ranks"});
}

}  // namespace

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : "";
  layouts(folder);
  at::set_num_threads(1);
  tessera::run_in_process(2, [&](const std::shared_ptr<tessera::World>& world) {
    const std::string svg = steps(world);
    if (world->rank() == 0) write(folder, "timeline.svg", svg);
  });
}
