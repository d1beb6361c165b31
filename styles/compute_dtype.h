#pragma once

#include <optional>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace tessera::detail {

// Names the dtype in which operators on a device compute, or none.
struct ComputeDtype {
  c10::DeviceType device = c10::kCPU;
  std::optional<c10::ScalarType> dtype;
};

// While it lives, autocast is on with that dtype on this thread; then its settings are those of before. Without a dtype
// it does nothing.
class ComputeIn {
 public:
  explicit ComputeIn(const ComputeDtype& wanted);
  ~ComputeIn();
  ComputeIn(const ComputeIn&) = delete;
  ComputeIn& operator=(const ComputeIn&) = delete;

 private:
  const ComputeDtype wanted_;
  bool was_on_ = false;
  c10::ScalarType dtype_before_ = c10::ScalarType::Undefined;
};

}  // namespace tessera::detail
