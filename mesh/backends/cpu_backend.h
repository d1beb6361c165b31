#pragma once

#include <string_view>

namespace tessera {

// Names the backend for collectives of CPU tensors in a world.
enum class CpuBackend { kGloo, kMpi };

// Returns "gloo" or "mpi".
constexpr std::string_view to_string(CpuBackend backend) {
  switch (backend) {
    case CpuBackend::kGloo: return "gloo";
    case CpuBackend::kMpi: return "mpi";
  }
  return "";
}

}  // namespace tessera
