#include "tessera/mesh/observers.h"

#include <utility>

namespace tessera {

std::shared_ptr<void> Observers::add(Sink sink) {
  auto held = std::make_shared<Sink>(std::move(sink));
  {
    const std::lock_guard lock(mutex_);
    sinks_.push_back(held);
    any_ = true;
  }
  return {nullptr, [self = shared_from_this(), key = held.get()](void*) { self->remove(key); }};
}

void Observers::remove(const Sink* sink) {
  const std::lock_guard lock(mutex_);
  std::erase_if(sinks_, [&](const auto& held) { return held.get() == sink; });
  any_ = !sinks_.empty();
}

void Observers::record(const CollectiveRecord& record) {
  std::vector<std::shared_ptr<Sink>> sinks;
  {
    const std::lock_guard lock(mutex_);
    sinks = sinks_;
  }
  for (const auto& sink : sinks) (*sink)(record);
}

}  // namespace tessera
