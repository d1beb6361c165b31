#include "tessera/dtensor/dispatch/viewed_tensor.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>

#include "tessera/dtensor/core/wrapper.h"
#include "tessera/dtensor/dispatch/gather.h"

namespace tessera::dispatch {
namespace {

// Says whether elements of a tensor may share an address, as in windows of `unfold` and in what `expand` has made.
bool may_share_addresses(const Spec& spec) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size
  for (std::size_t d = 0; d < spec.sizes.size(); ++d) {
    if (spec.sizes[d] > 1) dims.emplace_back(spec.strides[d], spec.sizes[d]);
  }
  std::ranges::sort(dims);
  int64_t extent = 1;
  for (const auto& [stride, size] : dims) {
    if (stride < extent) return true;
    extent += (size - 1) * stride;
  }
  return false;
}

// Copies a piece whose elements cannot be viewed as a wider dtype, of `size` bytes, though those of the whole can: it
// begins between two elements of the view, or its rows do.
void align_elements(at::Tensor& piece, int64_t size) {
  const int64_t ratio = size / static_cast<int64_t>(piece.itemsize());
  if (ratio <= 1) return;
  bool aligned = piece.storage_offset() % ratio == 0;
  for (int64_t d = 0; d + 1 < piece.dim(); ++d)
    aligned = aligned && (piece.size(d) <= 1 || piece.stride(d) % ratio == 0);
  if (!aligned) piece = piece.clone(at::MemoryFormat::Contiguous);
}

}  // namespace

ViewedTensor::ViewedTensor(const Call& call, const Decision& decision)
    : call_(call),
      decision_(decision),
      inference_(call.tensors[0].tensor->is_inference()),
      is_dtensor_(detail::is_dtensor(*call.tensors[0].tensor)) {
  if (!is_dtensor_) return;
  const at::Tensor& viewed = *call.tensors[0].tensor;
  const detail::Meta& meta = detail::meta(viewed);
  spec_ = meta.spec;
  piece_ = meta.local();
  bytes_before_ = detail::bytes_before(viewed);
  counters_ = meta.write_counters();
  original_ = meta.is_copied_view() ? meta.copy.viewed : counters_;
  find_copy(meta);
}

void ViewedTensor::find_copy(const detail::Meta& meta) {
  if (meta.is_copied_view() && !decision_.moved) {
    copy_ = meta.copy;
    if (may_copy()) forget_viewed();
    return;
  }
  if (!decision_.moved && !conjugates()) return;
  copy_ = copy_of_viewed();
  if (!decision_.moved || may_copy() || !can_bring_back(meta)) return;
  copy_.source->viewed = call_.tensors[0].tensor->unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr();
  copy_.source->layout = decision_.inputs[0];
}

bool ViewedTensor::conjugates() const { return call_.traits.is_view_as_real && is_dtensor_ && piece_.is_conj(); }

// Says whether the piece is copied before it is viewed, perhaps on some ranks alone.
bool ViewedTensor::may_copy() const {
  const auto size_of = [](const SpecPtr& spec) { return spec == nullptr ? 0 : c10::elementSize(spec->dtype); };
  const bool widens = !decision_.outputs.empty() && size_of(decision_.outputs[0]) > size_of(decision_.inputs[0]);
  return conjugates() || widens;
}

// Says whether a write to a view of the moved piece can be brought back: no pending reduction was done, the values are
// not those of a parameter that each use gathers, no elements of the tensor share an address, and it is no copy itself
// for which this cannot be.
bool ViewedTensor::can_bring_back(const detail::Meta& meta) const {
  if (meta.is_copied_view() && !meta.copy.source->viewed) return false;
  const Placements& own = meta.spec->placements;
  const Placements& moved = decision_.inputs[0]->placements;
  for (std::size_t i = 0; i < own.size(); ++i) {
    if ((own[i].is_partial() || moved[i].is_partial()) && own[i] != moved[i]) return false;
  }
  return !is_gathered(meta) && !may_share_addresses(*meta.spec);
}

detail::ViewCopy ViewedTensor::copy_of_viewed() const {
  detail::ViewCopy copy{
      .made_by = &call_.traits.name, .viewed = original_, .source = std::make_shared<detail::ViewSource>()};
  copy.set_current();
  return copy;
}

// Makes the results record a source to which nothing that is written can be brought back.
void ViewedTensor::forget_viewed() {
  const detail::ViewSource& source = *copy_.source;
  copy_.source = std::make_shared<detail::ViewSource>(
      detail::ViewSource{.writes = source.writes, .operators = source.operators, .raised = source.raised});
}

void ViewedTensor::prepare(at::Tensor& piece) const {
  if (conjugates()) piece = piece.resolve_conj();
}

void ViewedTensor::take(at::Tensor& piece) {
  if (!is_dtensor_) return;
  if (decision_.moved && copy_.source && copy_.source->viewed) copy_.source->moved = piece;
  if (decision_.outputs.empty() || decision_.outputs[0] == nullptr) return;
  align_elements(piece, static_cast<int64_t>(c10::elementSize(decision_.outputs[0]->dtype)));
}

at::Tensor ViewedTensor::piece_of(const at::Tensor& local, const Spec& spec) const {
  if (!is_dtensor_ || spec.sizes != spec_->sizes || spec.strides != spec_->strides || spec.dtype != spec_->dtype)
    return local;
  const bool is_whole =
      local.sizes() == piece_.sizes() && local.is_alias_of(piece_) && local.storage_offset() == piece_.storage_offset();
  const bool is_alike = local.is_conj() == piece_.is_conj() && local.is_neg() == piece_.is_neg();
  if (!is_whole || !is_alike || local.strides() == piece_.strides()) return local;
  const at::AutoDispatchBelowADInplaceOrView below;
  return local.as_strided(piece_.sizes(), piece_.strides(), piece_.storage_offset());
}

// Says whether a result is in other memory than the viewed piece, for whatever reason.
bool ViewedTensor::lies_apart(const at::Tensor& piece) const {
  return piece.numel() > 0 && piece.has_storage() && piece_.has_storage() && !piece.is_alias_of(piece_);
}

// LibTorch gives a copy too the viewed tensor's version, so a write to either counts as one to both.
void ViewedTensor::make_view(const at::Tensor& out, const at::Tensor& piece, std::size_t output) {
  if (!is_dtensor_) return;
  detail::place_view(out, bytes_before_, decision_.offset(output));
  detail::Meta& made = detail::meta(out);
  if (copy_.made_by == nullptr && lies_apart(piece)) copy_ = copy_of_viewed();
  if (copy_.made_by == nullptr) {
    made.share_writes(counters_);
    return;
  }
  const bool has_part = made.spec->mesh.is_member() && piece.numel() > 0;
  const bool is_copied = copy_.source->viewed && !piece.is_alias_of(copy_.source->moved);  // by the operator
  if (has_part && is_copied) forget_viewed();
  made.copy = copy_;
  made.set_version(counters_.version);
}

}  // namespace tessera::dispatch
