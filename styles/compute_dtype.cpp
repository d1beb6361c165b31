#include "tessera/styles/compute_dtype.h"

#include <ATen/autocast_mode.h>

namespace tessera::detail {
namespace {

AutocastSettings::Device settings_of(c10::DeviceType device) {
  return {.is_on = at::autocast::is_autocast_enabled(device), .dtype = at::autocast::get_autocast_dtype(device)};
}

void set(c10::DeviceType device, const AutocastSettings::Device& settings) {
  at::autocast::set_autocast_enabled(device, settings.is_on);
  at::autocast::set_autocast_dtype(device, settings.dtype);
}

void set(const AutocastSettings& settings) {
  set(c10::kCPU, settings.cpu);
  set(c10::kCUDA, settings.cuda);
}

}  // namespace

AutocastSettings autocast_settings() { return {.cpu = settings_of(c10::kCPU), .cuda = settings_of(c10::kCUDA)}; }

WithAutocast::WithAutocast(const AutocastSettings& settings) : before_(autocast_settings()) {
  at::autocast::increment_nesting();
  set(settings);
}

WithAutocast::~WithAutocast() {
  // The outermost one forgets the casts of parameters, which an optimizer may write next.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  set(before_);
}

ComputeIn::ComputeIn(const ComputeDtype& wanted) {
  if (!wanted.dtype) return;
  AutocastSettings settings = autocast_settings();
  (wanted.device == c10::kCUDA ? settings.cuda : settings.cpu) = {.is_on = true, .dtype = *wanted.dtype};
  autocast_.emplace(settings);
}

}  // namespace tessera::detail
