#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace train {

// Cuts a text into samples of `sequence` bytes, one after the other; each byte but the first is a target once, but for
// a rest that is shorter than a sample.
class Windows {
 public:
  // Throws std::invalid_argument when the text has not one sample.
  Windows(std::string text, int64_t sequence);

  int64_t size() const { return (static_cast<int64_t>(text_.size()) - 1) / sequence_; }
  int64_t sequence() const { return sequence_; }
  const std::string& text() const { return text_; }

  // Returns the bytes of these samples, int64 [samples, sequence], and the bytes that follow each of them, on `device`.
  // Nothing waits for the copies to a GPU.
  std::pair<at::Tensor, at::Tensor> batch(const std::vector<int64_t>& samples, c10::Device device = at::kCPU) const;

 private:
  std::string text_;
  int64_t sequence_;
};

}  // namespace train
