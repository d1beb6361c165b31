#pragma once

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

namespace tessera::testing {

// Joins two new network devices by a cable on which each frame takes `delay`: what one of them sends, the other one
// receives. They are TAP devices, made in the network namespace `netns`, from which they may be moved. For a kernel
// without netem.
class DelayedLink {
 public:
  // Throws std::runtime_error when a device cannot be made.
  DelayedLink(const std::string& netns, const std::string& one, const std::string& other,
              std::chrono::milliseconds delay);
  ~DelayedLink();
  DelayedLink(const DelayedLink&) = delete;
  DelayedLink& operator=(const DelayedLink&) = delete;

 private:
  void carry(std::chrono::milliseconds delay) const;

  int one_ = -1;
  int other_ = -1;
  std::atomic<bool> stopped_{false};
  std::thread carrier_;
};

}  // namespace tessera::testing
