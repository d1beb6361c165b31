#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/types.h>
// This comes after LibTorch, whose logging has a CHECK of its own.
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/training_state.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/world.h"
#include "tessera/tests/harness/ranks.h"

namespace tessera {

inline DeviceMesh line() { return init_device_mesh("cpu", {testing::world()->size()}, {"tp"}, testing::world()); }
inline bool is_last() { return testing::world()->rank() == testing::world()->size() - 1; }

// Has tensors of several kinds and placements, whose elements are all `value`.
struct Sample : torch::nn::Module {
  Sample(const DeviceMesh& on, double value) : mesh(on) {
    const auto add = [&](const char* name, std::vector<int64_t> shape, at::ScalarType dtype, Placement placement) {
      const at::Tensor tensor = register_parameter(name, torch::full(shape, value, dtype));
      Placements placements(static_cast<std::size_t>(mesh.ndim()), Replicate());
      placements.back() = placement;
      distribute_in_place(tensor, mesh, placements, kNoSource);
    };
    add("columns", {3, 10}, torch::kFloat, Shard(1));
    add("cyclic", {11, 2}, torch::kBFloat16, BlockCyclic(0, 2));
    add("few", {1, 2}, torch::kDouble, Shard(0));
    add("rows", {7, 3}, torch::kFloat, Shard(0));
    add("large", {300, 200}, torch::kFloat, Replicate());  // its replicas divide it
    register_parameter("plain", torch::full({3}, value));
    register_buffer("none", torch::zeros({0, 4}));
  }

  TrainingState state(int64_t step) { return {.mesh = mesh, .model = *this, .step = step}; }
  void fill(double value) {
    const torch::NoGradGuard no_grad;
    for (at::Tensor& p : parameters()) p.fill_(value);
  }
  // Returns the value that all elements have. Collective.
  double value() const {
    const torch::NoGradGuard no_grad;
    const double first = named_parameters()["plain"][0].item<double>();
    for (const at::Tensor& p : parameters()) {
      const at::Tensor whole = is_dtensor(p) ? full_tensor(p) : p;
      if (!whole.eq(first).all().item<bool>()) return -1;
    }
    return first;
  }

  DeviceMesh mesh;
};

inline std::vector<std::string> entries_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& item : std::filesystem::directory_iterator(folder)) names.push_back(item.path().filename().string());
  std::ranges::sort(names);
  return names;
}

inline void contains(const std::string& text, const std::string& want) {
  CAPTURE(text);
  CAPTURE(want);
  CHECK(text.find(want) != std::string::npos);
}

inline void flip_byte(const std::string& path, int64_t position) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(position);
  const auto byte = static_cast<char>(file.get());
  file.seekp(position);
  file.put(static_cast<char>(byte ^ 1));
}

}  // namespace tessera
