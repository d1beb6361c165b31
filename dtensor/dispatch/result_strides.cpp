#include "tessera/dtensor/dispatch/result_strides.h"

#include <algorithm>

#include <c10/core/MemoryFormat.h>

#include "tessera/dtensor/core/spec.h"

namespace tessera::dispatch {
namespace {

using Sizes = std::vector<int64_t>;

// Returns the index of the first tensor that counts: the arguments of a backward operator begin with the gradient of
// the result, which does not.
std::size_t first_image(const Call& call) { return call.traits.name.ends_with("_backward") ? 1 : 0; }

// Returns channels-last strides where one of the tensors from first_image() to `end` has as many dimensions and is
// channels-last, else row-major ones.
Sizes image_strides(const Call& call, const Sizes& sizes, std::size_t end) {
  for (std::size_t i = first_image(call); i < std::min(end, call.tensors.size()); ++i) {
    const at::Tensor& t = *call.tensors[i].tensor;
    if (!t.defined() || t.sizes().size() != sizes.size()) continue;
    switch (t.suggest_memory_format()) {
      case at::MemoryFormat::ChannelsLast: return c10::get_channels_last_strides_2d(sizes);
      case at::MemoryFormat::ChannelsLast3d: return c10::get_channels_last_strides_3d(sizes);
      default: break;
    }
  }
  return contiguous_strides(sizes);
}

// Returns the memory order of the first tensor of that shape that is not expanded, else row-major strides.
Sizes strides_as_input(const Call& call, const Sizes& sizes) {
  for (const TensorArg& entry : call.tensors) {
    if (!entry.tensor->defined() || entry.tensor->sizes() != at::IntArrayRef(sizes)) continue;
    Sizes strides = strides_like(sizes, *entry.tensor);
    if (std::ranges::find(strides, 0) == strides.end()) return strides;
  }
  return contiguous_strides(sizes);
}

}  // namespace

Sizes result_strides(const Call& call, rules::ResultOrder order, const rules::TensorInfo& result, const Sizes* told) {
  const Sizes& sizes = result.sizes;
  const bool on_cpu = call.first_spec->mesh.device().is_cpu();
  switch (order) {
    case rules::ResultOrder::kRowMajor: return contiguous_strides(sizes);
    case rules::ResultOrder::kImage: return image_strides(call, sizes, first_image(call) + 1);
    case rules::ResultOrder::kConvolution:
      if (result.dtype == at::kDouble && (!on_cpu || sizes.size() == 5)) return contiguous_strides(sizes);
      return image_strides(call, sizes, call.tensors.size());
    case rules::ResultOrder::kAsMeta:
    case rules::ResultOrder::kAsMetaOfWhole: break;
  }
  return told != nullptr ? *told : strides_as_input(call, sizes);
}

}  // namespace tessera::dispatch
