#include "tessera/bench/gpu_io.h"

#include <filesystem>
#include <functional>
#include <iostream>
#include <vector>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <unistd.h>

#include "tessera/bench/measure.h"
#include "tessera/dtensor/io/checkpoint_writer.h"
#include "tessera/dtensor/io/safetensors_file.h"

namespace tessera::bench {
namespace {

// Returns bytes per second, the median of `rounds` calls after one that warms up.
double rate(int64_t bytes, c10::Device device, int rounds, const std::function<void()>& body) {
  const auto timed = [&] {
    return time_calls(
        [&] {
          body();
          if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
        },
        1);
  };
  timed();
  std::vector<double> samples;
  for (int round = 0; round < rounds; ++round) samples.push_back(timed());
  return static_cast<double>(bytes) / figure_of(samples).median * 1e6;
}

void print_row(const char* name, double ours, double copy) {
  fmt::print("{:<32}{:>12.2f}{:>12.2f}{:>9.3f}\n", name, ours / 1e9, copy / 1e9, ours / copy);
  std::cout.flush();
}

}  // namespace

void measure_io(c10::Device device, int rounds) {
  const int64_t bytes = int64_t{1} << (device.is_cpu() ? 24 : 28);
  const auto path = std::filesystem::temp_directory_path() / fmt::format("tessera_gpu_io_{}.safetensors", getpid());
  const at::Tensor tensor = at::ones({bytes}, at::TensorOptions(at::kByte).device(device));
  const auto plan = plan_checkpoint({{"x", at::kByte, {bytes}, 0, 0}}, 2 * bytes, {});
  const auto save = [&] {
    CheckpointWriter writer(path.string(), plan);
    writer.append(tensor);
    writer.publish();
  };
  save();
  const SafetensorsFile file(path.string());
  const TensorEntry& entry = file.tensors().front();
  const at::Tensor host = at::ones({bytes}, at::TensorOptions(at::kByte).pinned_memory(device.is_cuda()));
  at::Tensor there = at::empty_like(tensor);
  const double to = rate(bytes, device, rounds, [&] { there.copy_(host, /*non_blocking=*/true); });
  const double from = rate(bytes, device, rounds, [&] { host.copy_(there, /*non_blocking=*/true); });
  const auto read = [&] { there = file.read_box(entry, whole_box(entry.shape), device); };
  print_row("file to device", rate(bytes, device, rounds, read), to);
  print_row("device to file, synced", rate(bytes, device, rounds, save), from);
  std::filesystem::remove(path);
}

}  // namespace tessera::bench
