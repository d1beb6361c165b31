#include "tessera/layers/sharded_state_dict.h"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "tessera/dtensor/assigned_weight.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/layers/parallel_embedding.h"

namespace tessera {
namespace {

void check(const ShardedStateDictOptions& options) {
  for (const ShardOffset& each : options.sharded_offsets) {
    if (each.offset >= 0 && each.offset < each.fragments) continue;
    throw std::invalid_argument(
        fmt::format("sharded_state_dict: offset {} is outside [0, {})", each.offset, each.fragments));
  }
}

// Returns this rank's number among the ranks that have the same piece.
int64_t replica(const Spec& spec) {
  int64_t number = 0;
  for (std::size_t i = 0; i < spec.placements.size(); ++i) {
    const auto mesh_dim = static_cast<int64_t>(i);
    if (spec.placements[i].is_replicate()) number = number * spec.mesh.size(mesh_dim) + spec.mesh.local_rank(mesh_dim);
  }
  return number;
}

// Describes one box of a piece: along each dimension where it begins in the whole and in the piece, and its size.
struct Box {
  std::vector<int64_t> global, local, sizes;
};

std::vector<Box> boxes_of(const Tile& tile) {
  std::vector<Box> boxes = {{}};
  for (const Intervals& positions : tile) {
    std::vector<Box> longer;
    for (const Box& box : boxes) {
      int64_t here = 0;
      for (const Interval& each : positions) {
        Box next = box;
        next.global.push_back(each.begin);
        next.local.push_back(here);
        next.sizes.push_back(each.size());
        here += each.size();
        longer.push_back(std::move(next));
      }
    }
    boxes = std::move(longer);
  }
  return boxes;
}

// Returns what tells a tensor from others: itself, and the memory of this rank's piece, which a plain tensor and the
// DTensor whose piece it is have in common.
std::set<const void*> marks_of(const at::Tensor& tensor) {
  std::set<const void*> marks = {tensor.unsafeGetTensorImpl()};
  if (is_dtensor(tensor) && !mesh_of(tensor).is_member()) return marks;
  const at::Tensor piece = is_dtensor(tensor) ? to_local(tensor.detach()) : tensor;
  if (piece.has_storage() && piece.numel() > 0 && !piece.is_meta()) marks.insert(piece.const_data_ptr());
  return marks;
}

class Writer {
 public:
  Writer(const ShardedStateDictOptions& options, std::set<const void*> vocabularies, int64_t plain_replica)
      : options_(options), vocabularies_(std::move(vocabularies)), plain_replica_(plain_replica) {}

  void add(const std::string& key, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const bool padded =
        std::ranges::any_of(marks_of(tensor), [this](const void* m) { return vocabularies_.contains(m); });
    if (!is_dtensor(tensor)) {
      entries_.push_back(entry(key, tensor.detach(), tensor.sizes().vec(), std::vector<int64_t>(tensor.dim(), 0),
                               plain_replica_, padded));
      return;
    }
    const Spec& spec = spec_of(tensor);
    if (spec.partial) {
      throw std::invalid_argument(fmt::format(
          "sharded_state_dict: {} is {}, a pending reduction; redistribute it first", key, to_string(spec)));
    }
    if (!spec.mesh.is_member()) return;
    const at::Tensor piece = to_local(tensor.detach());
    for (const Box& box : boxes_of(spec.tile)) {
      at::Tensor part = piece;
      for (std::size_t dim = 0; dim < box.sizes.size(); ++dim) {
        part = part.narrow(static_cast<int64_t>(dim), box.local[dim], box.sizes[dim]);
      }
      entries_.push_back(entry(key, part, spec.sizes, box.global, replica(spec), padded));
    }
  }

  std::vector<ShardedTensorEntry> take() { return std::move(entries_); }

 private:
  ShardedTensorEntry entry(const std::string& key, const at::Tensor& local, const std::vector<int64_t>& sizes,
                           const std::vector<int64_t>& offset, int64_t tensor_replica, bool padded) const {
    ShardedTensorEntry out{.key = key, .local = local, .global_shape = {}, .global_offset = {}};
    for (const ShardOffset& each : options_.sharded_offsets) {
      out.global_shape.push_back(each.fragments);
      out.global_offset.push_back(each.offset);
    }
    out.prepended = static_cast<int64_t>(options_.sharded_offsets.size());
    out.global_shape.insert(out.global_shape.end(), sizes.begin(), sizes.end());
    out.global_offset.insert(out.global_offset.end(), offset.begin(), offset.end());
    out.replica_id = {0, tensor_replica, options_.data_rank};
    out.allow_shape_mismatch = padded;
    return out;
  }

  const ShardedStateDictOptions& options_;
  const std::set<const void*> vocabularies_;
  const int64_t plain_replica_;
  std::vector<ShardedTensorEntry> entries_;
};

// Returns this rank's position on the mesh of the module's first DTensor; 0 without one, or outside its mesh.
int64_t place_on_mesh(const torch::nn::Module& module) {
  std::vector<at::Tensor> tensors = module.parameters();
  for (const at::Tensor& each : module.buffers()) tensors.push_back(each);
  for (const at::Tensor& each : tensors) {
    if (!is_dtensor(each)) continue;
    const std::vector<int64_t>& ranks = mesh_of(each).mesh().ranks();
    const auto found = std::ranges::find(ranks, mesh_of(each).world().rank());
    return found == ranks.end() ? 0 : found - ranks.begin();
  }
  return 0;
}

// Returns the marks of the tables that are sharded by their vocabulary. Their weights may be assigned pieces.
std::set<const void*> vocabularies(const torch::nn::Module& module) {
  std::set<const void*> out;
  const auto add = [&out](const torch::nn::Module& each) {
    const auto* const layer = dynamic_cast<const ParallelEmbeddingImpl*>(&each);
    if (layer == nullptr || layer->options.cut != EmbeddingCut::kVocabulary) return;
    out.merge(marks_of(layer->weight));
  };
  add(module);
  for (const auto& each : module.modules(/*include_self=*/false)) add(*each);
  return out;
}

}  // namespace

std::vector<ShardedTensorEntry> sharded_state_dict(const torch::nn::Module& module, const std::string& prefix,
                                                   const ShardedStateDictOptions& options) {
  check(options);
  Writer writer(options, vocabularies(module), options.tensor_rank.value_or(place_on_mesh(module)));
  for (const auto& [name, tensor] : used_parameters(module)) writer.add(prefix + name, tensor);
  for (const auto& each : module.named_buffers()) writer.add(prefix + each.key(), each.value());
  return writer.take();
}

}  // namespace tessera
