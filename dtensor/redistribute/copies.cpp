#include "tessera/dtensor/redistribute/copies.h"

#include <cstddef>
#include <cstring>
#include <limits>

#include "tessera/gpu_kernels/numbers.h"
#include "tessera/mesh/core/gpu_kernels.h"
#include "tessera/mesh/core/in_memory.h"

namespace tessera {
namespace {

// Below this many bytes, starting an ATen copy takes longer than the copy itself.
constexpr int64_t kSmallCopy = 64 << 10;

template <typename Byte>
struct Side {
  Byte* data;
  const int64_t* strides;  // in elements
};

// Loops over the elements of the outer dimensions, and copies whole runs of the innermost.
void copy_small(const Side<char>& to, const Side<const char>& from, const int64_t* sizes, std::size_t dims,
                int64_t width) {
  if (dims == 0) {
    std::memcpy(to.data, from.data, static_cast<std::size_t>(width));
    return;
  }
  if (dims == 1 && to.strides[0] == 1 && from.strides[0] == 1) {
    std::memcpy(to.data, from.data, static_cast<std::size_t>(width * sizes[0]));
    return;
  }
  for (int64_t i = 0; i < sizes[0]; ++i) {
    copy_small({.data = to.data + i * to.strides[0] * width, .strides = to.strides + 1},
               {.data = from.data + i * from.strides[0] * width, .strides = from.strides + 1}, sizes + 1, dims - 1,
               width);
  }
}

int64_t numel_of(const StridedCopy& part) {
  int64_t numel = 1;
  for (const int64_t size : part.sizes) numel *= size;
  return numel;
}

const char* first_from(const StridedCopy& part) {
  return static_cast<const char*>(part.from.const_data_ptr()) + part.from_offset * part.from.element_size();
}
char* first_to(const StridedCopy& part) {
  return static_cast<char*>(part.to.mutable_data_ptr()) + part.to_offset * part.to.element_size();
}

// Says whether the innermost elements are adjacent in both tensors.
bool has_runs(const StridedCopy& part) {
  return !part.sizes.empty() && part.from_strides.back() == 1 && part.to_strides.back() == 1;
}

// Returns the bytes of the widest word: a part of a run where there are runs, else an element.
int word_of(const StridedCopy& part, int64_t element) {
  const bool runs = has_runs(part);
  const int64_t adjacent = runs ? part.sizes.back() * element : element;
  int word = gpu::word_bytes(gpu::address(first_from(part)), gpu::address(first_to(part)), adjacent);
  for (std::size_t d = 0; d + (runs ? 1 : 0) < part.sizes.size(); ++d) {
    word = gpu::word_bytes(word, part.from_strides[d] * element, part.to_strides[d] * element);
  }
  return word;
}

}  // namespace

void copy_part(const StridedCopy& part) {
  const int64_t width = part.to.element_size();
  if (part.to.is_cpu() && part.from.is_cpu() && numel_of(part) * width <= kSmallCopy) {
    copy_small({.data = first_to(part), .strides = part.to_strides.data()},
               {.data = first_from(part), .strides = part.from_strides.data()}, part.sizes.data(), part.sizes.size(),
               width);
    return;
  }
  part.to.as_strided(part.sizes, part.to_strides, part.to.storage_offset() + part.to_offset)
      .copy_(part.from.as_strided(part.sizes, part.from_strides, part.from.storage_offset() + part.from_offset));
}

std::optional<gpu::Copy> copy_request(const StridedCopy& part) {
  const int64_t element = part.to.element_size();
  const std::size_t dims = part.sizes.size();
  if (dims > gpu::kCopyDims || !is_in_memory(part.to) || !is_in_memory(part.from)) return std::nullopt;
  const int word = word_of(part, element);
  const bool runs = has_runs(part);
  if ((!runs && word != element) || numel_of(part) * element / word > std::numeric_limits<int32_t>::max()) {
    return std::nullopt;
  }
  gpu::Copy out{.from = first_from(part), .to = first_to(part), .word = word, .ndim = 0};
  for (std::size_t d = 0; d < dims; ++d) {
    const bool run = runs && d + 1 == dims;
    out.sizes[d] = static_cast<int32_t>(run ? part.sizes[d] * element / word : part.sizes[d]);
    out.from_strides[d] = run ? 1 : part.from_strides[d] * element / word;
    out.to_strides[d] = run ? 1 : part.to_strides[d] * element / word;
  }
  out.ndim = static_cast<int32_t>(dims);
  if (dims == 0) out.sizes[out.ndim++] = 1;  // one element
  return out;
}

void Copies::operator()(const StridedCopy& part) {
  if (kernels_for(part.to) != nullptr && part.from.device() == part.to.device()) {
    if (const std::optional<gpu::Copy> request = copy_request(part)) {
      on_ = part.to;
      collected_.push_back(*request);
      return;
    }
  }
  copy_part(part);
}

void Copies::run() {
  if (collected_.empty()) return;
  const gpu::Copies request{.copies = collected_.data(), .count = static_cast<int64_t>(collected_.size())};
  start_kernel("copy", on_, [&](void* stream) { return kernels_for(on_)->copy(&request, stream); });
}

}  // namespace tessera
