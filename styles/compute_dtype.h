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

// Holds the settings of autocast on a thread.
struct AutocastSettings {
  struct Device {
    bool is_on = false;
    c10::ScalarType dtype = c10::ScalarType::Undefined;
  };
  Device cpu, cuda;
};
// Returns those of this thread.
AutocastSettings autocast_settings();

// While it lives, autocast has the given settings on this thread; then it has those of before again.
class WithAutocast {
 public:
  explicit WithAutocast(const AutocastSettings& settings);
  ~WithAutocast();
  WithAutocast(const WithAutocast&) = delete;
  WithAutocast& operator=(const WithAutocast&) = delete;

 private:
  const AutocastSettings before_;
};

// Is a WithAutocast in which autocast is on with that dtype. Without a dtype it does nothing.
class ComputeIn {
 public:
  explicit ComputeIn(const ComputeDtype& wanted);

 private:
  std::optional<WithAutocast> autocast_;
};

}  // namespace tessera::detail
