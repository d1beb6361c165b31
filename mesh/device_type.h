#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

namespace tessera {

// Returns whether a mesh may be on devices of this type: the CPU, GPUs, or the accelerator that has registered itself
// with this process's LibTorch.
bool is_mesh_device(c10::DeviceType type);

// Returns the device type called "cpu" or "cuda", or of the registered accelerator. On any other name throws
// std::invalid_argument, whose text starts with `function`.
c10::DeviceType parse_device(const char* function, const std::string& device);

// Returns the index of the device of rank `rank`, which is process number `local_rank` of its host: device `given`, or
// the only one that the process sees, as under srun --gpus-per-task=1, or the one with the number of the process.
// `type` is not the CPU. Throws std::runtime_error when there is no such device.
int device_index_of(c10::DeviceType type, int64_t rank, int64_t local_rank, std::optional<int> given);

// Returns whether the current stream of `device` is being captured in a CUDA graph.
bool is_captured(c10::Device device);

}  // namespace tessera
