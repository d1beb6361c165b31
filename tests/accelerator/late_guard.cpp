// Registers what LibTorch asks of an accelerator: devices, streams and events.

#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <utility>

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "tessera/tests/accelerator/late_memory.h"
#include "tessera/tests/accelerator/late_stream.h"

namespace tessera::testing {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

struct ThreadState {
  DeviceIndex device = 0;
  std::array<c10::StreamId, kDevices> streams = {};
};

ThreadState& here() {
  static thread_local ThreadState state;
  return state;
}

c10::StreamId& stream_of(DeviceIndex device) { return here().streams.at(static_cast<std::size_t>(device)); }

Stream of_pool(Device device) {
  static std::atomic<int> next{0};
  return Stream(Stream::UNSAFE, device, 1 + next++ % (kStreams - 1));
}

struct LateEvent {
  std::shared_ptr<Flag> flag;  // of the last record
};

const std::shared_ptr<Flag>& flag_of(void* event) { return static_cast<LateEvent*>(event)->flag; }

// Returns how many devices this process sees: TESSERA_TEST_LATE_DEVICES, as CUDA_VISIBLE_DEVICES says it of GPUs.
DeviceIndex visible_devices() {
  const char* const given = std::getenv("TESSERA_TEST_LATE_DEVICES");
  return given == nullptr ? kDevices : static_cast<DeviceIndex>(std::atoi(given));
}

struct LateGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kAccelerator; }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    here().device = device.index();
    return before;
  }
  Device getDevice() const override { return {kAccelerator, here().device}; }
  void setDevice(Device device) const override { here().device = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { here().device = device.index(); }
  DeviceIndex deviceCount() const noexcept override { return visible_devices(); }

  Stream getStream(Device device) const override {
    const Device known(kAccelerator, device.has_index() ? device.index() : here().device);
    return Stream(Stream::UNSAFE, known, stream_of(known.index()));
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return of_pool(device); }
  Stream getNewStream(Device device, int) const override { return of_pool(device); }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    stream_of(stream.device_index()) = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override { return late_stream(stream).is_idle(); }
  void synchronizeStream(const Stream& stream) const override { late_stream(stream).drain(); }
  void synchronizeDevice(DeviceIndex device) const override {
    for (c10::StreamId id = 0; id < kStreams; ++id) {
      late_stream(Stream(Stream::UNSAFE, Device(kAccelerator, device), id)).drain();
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& stream) const override {
    keep_for_stream(memory, stream);
  }

  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new LateEvent;
    const auto flag = std::make_shared<Flag>();
    static_cast<LateEvent*>(*event)->flag = flag;
    late_stream(stream).give([flag] { flag->set(); });
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) late_stream(stream).give([flag = flag_of(event)] { flag->wait(); });
  }
  bool queryEvent(void* event) const override { return event == nullptr || flag_of(event)->is_set(); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) flag_of(event)->wait();
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<LateEvent*>(event); }
};

struct LateHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return visible_devices(); }
  DeviceIndex getCurrentDevice() const override { return here().device; }
  void setCurrentDevice(DeviceIndex device) const override { here().device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(here().device, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
};

const bool kRegistered = [] {
  c10::register_privateuse1_backend("late");
  at::RegisterPrivateUse1HooksInterface(new LateHooks);
  return true;
}();

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, LateGuard)

}  // namespace tessera::testing
