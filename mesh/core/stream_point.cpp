#include "tessera/mesh/core/stream_point.h"

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace tessera {

struct StreamPoint::Mark {
  explicit Mark(c10::Stream marked) : stream(marked), event(marked.device_type()) { event.record(stream); }

  const c10::Stream stream;
  c10::Event event;
};

StreamPoint StreamPoint::here(c10::Device device) {
  if (device.is_cpu()) return {};
  return StreamPoint(std::make_shared<const Mark>(c10::impl::VirtualGuardImpl(device.type()).getStream(device)));
}

void StreamPoint::wait() const {
  if (!mark_) return;
  const c10::Stream mine = c10::impl::VirtualGuardImpl(mark_->stream.device_type()).getStream(mark_->stream.device());
  if (mine != mark_->stream) mark_->event.block(mine);
}

void StreamPoint::keep(const at::Tensor& tensor) const {
  if (!mark_ || !tensor.defined() || !tensor.has_storage()) return;
  if (tensor.device().type() != mark_->stream.device_type()) return;  // it is on its way through the host's memory
  const c10::impl::VirtualGuardImpl guard(mark_->stream.device_type());
  const c10::Stream mine = guard.getStream(mark_->stream.device());
  if (mine != mark_->stream) guard.recordDataPtrOnStream(tensor.storage().data_ptr(), mine);
}

void StreamPoint::finish() const {
  if (mark_) mark_->event.synchronize();
}

StreamOfPoint::StreamOfPoint(const StreamPoint& point) {
  if (point.mark_) guard_.emplace(point.mark_->stream);
}

SideStream::SideStream(c10::Device device) {
  if (device.is_cpu()) return;
  const StreamPoint before = StreamPoint::here(device);
  guard_.emplace(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
  before.wait();
}

}  // namespace tessera
