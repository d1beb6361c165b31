#include "tessera/dtensor/core/spec.h"

#include <algorithm>
#include <mutex>
#include <numeric>
#include <unordered_map>

#include <ATen/ops/empty_strided.h>
#include <c10/util/hash.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tessera {
namespace {

std::size_t hash_of(uint64_t mesh_id, const Placements& placements, at::IntArrayRef sizes, at::IntArrayRef strides,
                    at::ScalarType dtype) {
  std::size_t seed = mesh_id;
  for (const Placement& p : placements) seed = c10::hash_combine(seed, p.hash());
  for (const int64_t size : sizes) seed = c10::hash_combine(seed, static_cast<uint64_t>(size));
  for (const int64_t stride : strides) seed = c10::hash_combine(seed, static_cast<uint64_t>(stride));
  seed = c10::hash_combine(seed, static_cast<uint64_t>(dtype));
  return seed;
}

// Invariants:
//   - At most one live Spec has given properties; the table holds weak references to Specs, by hash.
//   - It is swept whenever it has doubled since the last sweep, so beyond 1,024 entries it stays within about twice the
//     live Specs.
//   - mutex_ guards every member.
class InternTable {
 public:
  SpecPtr find_or_make(const DeviceMesh& mesh, const Placements& placements, at::IntArrayRef sizes,
                       at::IntArrayRef strides, at::ScalarType dtype) {
    const std::size_t hash = hash_of(mesh.id(), placements, sizes, strides, dtype);
    const std::lock_guard lock(mutex_);
    auto [it, end] = entries_.equal_range(hash);
    auto vacant = end;
    for (; it != end; ++it) {
      SpecPtr found = it->second.lock();
      if (!found) {
        vacant = it;
      } else if (found->mesh.id() == mesh.id() && found->placements == placements && sizes == found->sizes &&
                 strides == found->strides && found->dtype == dtype) {
        return found;
      }
    }
    SpecPtr made = make(mesh, placements, sizes, strides, dtype);
    if (vacant != end) {  // a Spec that is made and dropped repeatedly takes one entry
      vacant->second = made;
    } else {
      entries_.emplace(hash, made);
      if (entries_.size() > sweep_at_) sweep();
    }
    return made;
  }

  std::size_t live() {
    const std::lock_guard lock(mutex_);
    sweep();
    return entries_.size();
  }

 private:
  SpecPtr make(const DeviceMesh& mesh, const Placements& placements, at::IntArrayRef sizes, at::IntArrayRef strides,
               at::ScalarType dtype) {
    check_layout(placements, mesh.mesh(), sizes, "layout");
    auto spec = std::make_shared<Spec>(Spec{.id = ++last_id_,
                                            .mesh = mesh,
                                            .placements = placements,
                                            .sizes = sizes.vec(),
                                            .strides = strides.vec(),
                                            .dtype = dtype,
                                            .tile = {},
                                            .local_sizes = {0}});
    for (const Placement& p : placements) {
      spec->sharded |= p.is_shard();
      spec->partial |= p.is_partial();
    }
    if (mesh.is_member()) {
      spec->tile = local_tile(spec->sizes, placements, mesh.mesh().shape(), *mesh.coordinate());
      spec->local_sizes = shape_of(spec->tile);
    }
    return spec;
  }

  void sweep() {
    std::erase_if(entries_, [](const auto& entry) { return entry.second.expired(); });
    sweep_at_ = std::max<std::size_t>(1024, 2 * entries_.size());
  }

  std::mutex mutex_;
  std::unordered_multimap<std::size_t, std::weak_ptr<const Spec>> entries_;
  std::size_t sweep_at_ = 1024;
  uint64_t last_id_ = 0;
};

InternTable& table() {
  static auto* const instance = new InternTable();  // never destroyed: tensors may outlive static destruction
  return *instance;
}

int64_t product(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

}  // namespace

int64_t Spec::numel() const { return product(sizes); }
int64_t Spec::local_numel() const { return product(local_sizes); }

SpecPtr intern_spec(const DeviceMesh& mesh, const Placements& placements, at::IntArrayRef sizes,
                    at::IntArrayRef strides, at::ScalarType dtype) {
  return table().find_or_make(mesh, placements, sizes, strides, dtype);
}

SpecPtr intern_spec(const DeviceMesh& mesh, const Placements& placements, at::IntArrayRef sizes, at::ScalarType dtype) {
  return intern_spec(mesh, placements, sizes, contiguous_strides(sizes), dtype);
}

SpecPtr replicated_spec(const DeviceMesh& mesh, const at::Tensor& plain) {
  const Placements all(static_cast<std::size_t>(mesh.ndim()), Replicate());
  return intern_spec(mesh, all, plain.sizes(), plain.strides(), plain.scalar_type());
}

SpecPtr with_placements(const Spec& spec, const Placements& placements) {
  return intern_spec(spec.mesh, placements, spec.sizes, spec.strides, spec.dtype);
}

std::size_t interned_specs() { return table().live(); }

std::vector<int64_t> contiguous_strides(at::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    strides[i] = step;
    step *= std::max<int64_t>(sizes[i], 1);
  }
  return strides;
}

std::vector<int64_t> strides_like(at::IntArrayRef sizes, const at::Tensor& local) {
  const at::IntArrayRef from = local.strides();
  if (local.is_contiguous() || from.size() != sizes.size()) return contiguous_strides(sizes);
  std::vector<std::size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return from[a] > from[b]; });
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    const std::size_t dim = order[i];
    if (from[dim] == 0 && local.size(static_cast<int64_t>(dim)) > 1) continue;
    strides[dim] = step;
    step *= std::max<int64_t>(sizes[dim], 1);
  }
  return strides;
}

int64_t bytes_of_even_piece(const Spec& spec, const Placements& placements) {
  int64_t parts = 1;
  for (std::size_t i = 0; i < placements.size(); ++i) {
    if (placements[i].is_shard()) parts *= spec.mesh.size(static_cast<int64_t>(i));
  }
  return spec.numel() * static_cast<int64_t>(c10::elementSize(spec.dtype)) / parts;
}

std::vector<int64_t> dense_strides(const Spec& spec) {
  return strides_like(spec.local_sizes, at::empty_strided(spec.sizes, spec.strides, at::TensorOptions(c10::kMeta)));
}

std::string to_string(const Spec& spec) {
  return fmt::format("{} [{}] on {} as {}", c10::toString(spec.dtype), fmt::join(spec.sizes, ", "),
                     spec.mesh.to_string(), to_string(spec.placements));
}

}  // namespace tessera
