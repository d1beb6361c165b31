#include "tessera/bench/plan_large.h"

#include <algorithm>
#include <ctime>

#include <fmt/format.h>

#include "tessera/placement/plan.h"
#include "tessera/placement/planner/plan_redistribute.h"

namespace tessera::bench {
namespace {

// A tensor and the placements that a mesh dimension may give it.
struct Tensor {
  std::string name;
  Sizes shape;
  std::function<std::vector<Placement>(int64_t)> choices_of;
};

// Without interval lists on 12 mesh dimensions, where planning for some pairs takes half a minute.
std::vector<Tensor> tensors(std::size_t mesh_ndim) {
  const auto plain = [](int64_t) { return plain_choices(); };
  const Sizes small = {500, 700};
  const bool lists = mesh_ndim < 12;
  const auto uneven = [=](int64_t ranks) { return uneven_choices(ranks, small, lists); };
  return {{"4096x8192", {4096, 8192}, plain},
          {"5000x7001", {5000, 7001}, plain},
          {lists ? "500x700, lists and sizes" : "500x700, sizes", small, uneven}};
}

LargeMesh planned(const Mesh& mesh, const Tensor& tensor, const NamedModel& by, const std::vector<Pair>& pairs) {
  LargeMesh out{.mesh = mesh.to_string(), .tensor = tensor.name, .model = by.name};
  std::vector<double> times;
  for (const auto& [from, to] : pairs) {  // each once, since nothing is there to be remembered
    const double start = processor_microseconds();
    const Plan plan = plan_redistribute(tensor.shape, at::kFloat, mesh, from, to, by.model);
    times.push_back(processor_microseconds() - start);
    ++out.pairs;
    out.microseconds += plan.microseconds();
    out.bytes += static_cast<double>(plan.max_bytes());
    out.steps += static_cast<int64_t>(plan.steps().size());
  }
  out.worst = *std::max_element(times.begin(), times.end());
  out.planning = figure_of(std::move(times));
  return out;
}

}  // namespace

double processor_microseconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}

std::vector<LargeMesh> plan_on_large_meshes(std::size_t pairs_per_row) {
  std::vector<LargeMesh> out;
  for (const Sizes& sizes : {Sizes{8, 64}, Sizes{8, 8, 8}, Sizes{64, 64}, Sizes{16, 16, 16}, Sizes(12, 2)}) {
    const Mesh mesh(sizes);
    const std::size_t count = sizes.size() < 12 ? pairs_per_row : (pairs_per_row + 2) / 3;
    for (const Tensor& tensor : tensors(sizes.size())) {
      const std::vector<Pair> pairs = drawn_pairs(mesh, tensor.shape, tensor.choices_of, count, 5);
      for (const NamedModel& by : models(mesh)) {
        if (by.name == "gloo" || by.name == "bandwidth") out.push_back(planned(mesh, tensor, by, pairs));
      }
    }
  }
  return out;
}

}  // namespace tessera::bench
