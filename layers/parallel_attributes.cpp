#include "tessera/layers/parallel_attributes.h"

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <fmt/format.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/mesh_checks.h"
#include "tessera/placement/layout.h"
#include "tessera/placement/partition.h"

namespace tessera {
namespace {

std::string text_of(const TensorParallelAttributes& a) {
  return a.is_parallel ? fmt::format("parallel along dimension {} with stride {}", a.partition_dim, a.partition_stride)
                       : "not parallel";
}

// Returns the number of blocks per rank. For BlockCyclic it follows from the block size: on one rank the blocks are
// adjacent, so that its part has only one interval.
int64_t pieces_a_rank(const Partition& partition, int64_t size, int64_t ranks) {
  const bool blocks = partition.name() == block_cyclic(1)->name();
  const int64_t pieces = blocks ? size / (ranks * std::stoll(partition.parameters()))
                                : static_cast<int64_t>(partition.part(size, ranks, 0).size());
  return std::max<int64_t>(1, pieces);
}

// Keeps the attributes that were set on plain tensors. LibTorch's own metadata of a tensor is no place for them:
// set_data, and so Module::to, clears it.
//
// Invariants:
//   - an address in entries_ stands for one tensor: the entry's weak pointer keeps the address of a tensor that is gone
//     from being used again;
//   - entries_ is read and written under mutex_.
class SetAttributes {
 public:
  static SetAttributes& of_process() {
    static auto& all = *new SetAttributes;  // tensors may outlive every static object
    return all;
  }
  std::optional<TensorParallelAttributes> find(const at::Tensor& plain) {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(plain.unsafeGetTensorImpl());
    return found == entries_.end() ? std::nullopt : std::make_optional(found->second.attributes);
  }
  void put(const at::Tensor& plain, const TensorParallelAttributes& attributes) {
    const std::lock_guard lock(mutex_);
    drop_gone();
    entries_.insert_or_assign(plain.unsafeGetTensorImpl(), Entry{Weak(plain.getIntrusivePtr()), attributes});
  }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl>;
  struct Entry {
    Weak tensor;
    TensorParallelAttributes attributes;
  };
  // Entries of dead tensors are dropped when the map has doubled since the last time, so that the cost per tensor is
  // small.
  void drop_gone() {
    if (entries_.size() < next_drop_) return;
    std::erase_if(entries_, [](const auto& each) { return each.second.tensor.expired(); });
    next_drop_ = 2 * entries_.size() + 64;
  }

  std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Entry> entries_;
  std::size_t next_drop_ = 64;
};

std::optional<TensorParallelAttributes> set_on(const at::Tensor& plain) {
  return plain.defined() ? SetAttributes::of_process().find(plain) : std::nullopt;
}

[[noreturn]] void refuse(const char* who, const std::string& why) {
  throw std::invalid_argument(fmt::format("{}: {}", who, why));
}

void put_on(const at::Tensor& plain, const TensorParallelAttributes& attributes, const char* who) {
  if (!plain.defined()) refuse(who, "the tensor is undefined");
  if (attributes.is_parallel && (attributes.partition_dim < 0 || attributes.partition_dim >= plain.dim())) {
    refuse(who, fmt::format("dim {} of a tensor of {} dimensions; it is one of them, from 0", attributes.partition_dim,
                            plain.dim()));
  }
  if (attributes.partition_stride < 1)
    refuse(who, fmt::format("stride {}; it is at least 1", attributes.partition_stride));
  SetAttributes::of_process().put(plain, attributes);
}

void check_alike(const at::Tensor& tensor, const TensorParallelAttributes& wanted, const char* who) {
  const TensorParallelAttributes is = tensor_parallel_attributes(tensor);
  if (is == wanted) return;
  refuse(who,
         fmt::format("the tensor is {}, and was to be {}; redistribute makes it so", text_of(is), text_of(wanted)));
}

}  // namespace

TensorParallelAttributes tensor_parallel_attributes(const at::Tensor& tensor) {
  if (!is_dtensor(tensor)) return set_on(tensor).value_or(TensorParallelAttributes());
  const Spec& spec = spec_of(tensor);
  for (std::size_t i = 0; i < spec.placements.size(); ++i) {
    const Placement& p = spec.placements[i];
    if (!p.is_shard()) continue;
    return {.is_parallel = true,
            .partition_dim = p.tensor_dim(),
            .partition_stride = pieces_a_rank(p.partition(), spec.sizes[static_cast<std::size_t>(p.tensor_dim())],
                                              spec.mesh.size(static_cast<int64_t>(i)))};
  }
  return {};
}

void set_tensor_parallel_attributes(const at::Tensor& tensor, bool is_parallel, int64_t dim, int64_t stride) {
  constexpr const char* kWho = "set_tensor_parallel_attributes";
  const TensorParallelAttributes wanted{.is_parallel = is_parallel, .partition_dim = dim, .partition_stride = stride};
  if (is_dtensor(tensor)) return check_alike(tensor, is_parallel ? wanted : TensorParallelAttributes(), kWho);
  if (const auto before = set_on(tensor); before && *before != wanted) {
    refuse(kWho, fmt::format(
                     "the tensor was set to be {} before, and now to be {}; copy_tensor_parallel_attributes overwrites",
                     text_of(*before), text_of(wanted)));
  }
  put_on(tensor, wanted, kWho);
}

void set_defaults_if_not_set_tensor_parallel_attributes(const at::Tensor& tensor) {
  if (is_dtensor(tensor) || set_on(tensor)) return;
  put_on(tensor, {}, "set_defaults_if_not_set_tensor_parallel_attributes");
}

void copy_tensor_parallel_attributes(const at::Tensor& destination, const at::Tensor& source) {
  constexpr const char* kWho = "copy_tensor_parallel_attributes";
  const TensorParallelAttributes wanted = tensor_parallel_attributes(source);
  if (is_dtensor(destination)) return check_alike(destination, wanted, kWho);
  if (is_dtensor(source) || set_on(source)) put_on(destination, wanted, kWho);
}

bool is_not_tensor_parallel_duplicate(const at::Tensor& parameter, const DeviceMesh& mesh) {
  check_one_dimension(mesh, "is_not_tensor_parallel_duplicate");
  if (!is_dtensor(parameter)) return tensor_parallel_attributes(parameter).is_parallel || mesh.local_rank(0) == 0;
  const Spec& spec = spec_of(parameter);
  if (spec.partial) {
    throw std::invalid_argument(fmt::format(
        "is_not_tensor_parallel_duplicate: {} is a pending reduction; redistribute it first", to_string(spec)));
  }
  if (!spec.mesh.is_member()) return false;
  for (const int64_t rank : mesh.group_ranks(0)) {
    if (rank == mesh.world().rank()) return true;
    const auto coordinate = spec.mesh.mesh().coordinate_of(rank);
    if (coordinate && local_tile(spec.sizes, spec.placements, spec.mesh.mesh().shape(), *coordinate) == spec.tile)
      return false;
  }
  return true;
}

}  // namespace tessera
