#include "tessera/examples/train/windows.h"

#include <cstddef>
#include <stdexcept>

#include <ATen/ops/empty.h>
#include <fmt/format.h>

namespace train {

Windows::Windows(std::string text, int64_t sequence) : text_(std::move(text)), sequence_(sequence) {
  if (static_cast<int64_t>(text_.size()) > sequence) return;
  throw std::invalid_argument(fmt::format(
      "a text of {} bytes has no sample of {} bytes and the next one; give --data more text, or a lower --sequence",
      text_.size(), sequence));
}

std::pair<at::Tensor, at::Tensor> Windows::batch(const std::vector<int64_t>& samples, c10::Device device) const {
  const auto rows = static_cast<int64_t>(samples.size());
  const at::TensorOptions host = at::TensorOptions(at::kLong).pinned_memory(device.is_cuda());
  const at::Tensor ids = at::empty({rows, sequence_}, host), targets = at::empty({rows, sequence_}, host);
  auto* id = ids.mutable_data_ptr<int64_t>();
  auto* target = targets.mutable_data_ptr<int64_t>();
  for (const int64_t sample : samples) {
    for (int64_t i = sample * sequence_; i < (sample + 1) * sequence_; ++i) {
      *id++ = static_cast<unsigned char>(text_[static_cast<std::size_t>(i)]);
      *target++ = static_cast<unsigned char>(text_[static_cast<std::size_t>(i + 1)]);
    }
  }
  return {ids.to(device, /*non_blocking=*/true), targets.to(device, /*non_blocking=*/true)};
}

}  // namespace train
