#pragma once

#include <string_view>

namespace tessera {

// What carries CPU tensors between the ranks of a world.
enum class CpuBackend { kGloo, kMpi };

// "gloo", "mpi".
constexpr std::string_view to_string(CpuBackend backend) {
  switch (backend) {
    case CpuBackend::kGloo: return "gloo";
    case CpuBackend::kMpi: return "mpi";
  }
  return "";
}

}  // namespace tessera
