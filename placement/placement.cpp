#include "tessera/placement/placement.h"

#include <algorithm>
#include <ostream>
#include <stdexcept>
#include <utility>

#include <c10/util/hash.h>
#include <fmt/format.h>

#include "tessera/placement/reduction.h"

namespace tessera {

Placement Placement::shard(int64_t tensor_dim, PartitionPtr partition) {
  if (!partition)
    throw std::invalid_argument("Shard: the partition is null; give one, or none for torch.chunk's parts");
  Placement out;
  out.kind_ = Kind::kShard;
  out.dim_ = tensor_dim;
  out.what_ = std::move(partition);
  return out;
}

Placement Placement::partial(ReductionPtr reduction) {
  if (!reduction) throw std::invalid_argument("Partial: the reduction is null; give one, or a ReduceOp");
  Placement out;
  out.kind_ = Kind::kPartial;
  out.what_ = std::move(reduction);
  return out;
}

bool Placement::is_partial(ReduceOp op) const { return is_partial() && what_.get() == plain_reduction(op).get(); }

const Partition& Placement::partition() const {
  if (is_shard()) return static_cast<const Partition&>(*what_);
  throw std::logic_error(fmt::format("Placement: {} is no Shard and has no partition", to_string(*this)));
}

const Reduction& Placement::reduction() const { return *reduction_ptr(); }

ReductionPtr Placement::reduction_ptr() const {
  if (is_partial()) return std::static_pointer_cast<const Reduction>(what_);
  throw std::logic_error(fmt::format("Placement: {} is no Partial and has no reduction", to_string(*this)));
}

Placement Placement::ordered(int64_t order) const {
  constexpr int64_t kMost = 1 << 16;
  if (!is_shard() || order < 0 || order > kMost) {
    throw std::invalid_argument(fmt::format(
        "Placement: {} cannot have order {}; a Shard has one, from 0 for what cuts first", to_string(*this), order));
  }
  Placement out = *this;
  out.order_ = static_cast<int32_t>(order);
  return out;
}

Placement Placement::on(int64_t tensor_dim) const {
  if (!is_shard()) throw std::logic_error(fmt::format("Placement: {} is on no tensor dimension", to_string(*this)));
  Placement out = *this;
  out.dim_ = tensor_dim;
  return out;
}

std::size_t Placement::hash() const {
  const std::size_t small = (static_cast<std::size_t>(kind_) << 60) ^ (static_cast<std::size_t>(order_) << 40) ^
                            static_cast<std::size_t>(dim_);
  return what_ ? c10::hash_combine(what_->hash(), small) : small;
}

Placement Partial(ReduceOp op) { return Placement::partial(plain_reduction(op)); }
Placement NormPartial(double p) { return Placement::partial(norm_reduction(p)); }
Placement MaskedPartial(ReduceOp op) { return Placement::partial(masked_reduction(op)); }

std::string to_string(const Placement& placement) {
  if (placement.is_replicate()) return "R";
  if (placement.is_partial()) return fmt::format("P({})", placement.reduction().text());
  const Partition& partition = placement.partition();
  return fmt::format("{}({}{}{}){}", partition.name(), placement.tensor_dim(),
                     partition.parameters().empty() ? "" : ",", partition.parameters(),
                     placement.order() == 0 ? "" : fmt::format("@{}", placement.order()));
}

std::string to_string(const Placements& placements) {
  std::string out = "[";
  for (const Placement& placement : placements) {
    if (out.size() > 1) out += ", ";
    out += to_string(placement);
  }
  return out + "]";
}

std::ostream& operator<<(std::ostream& out, const Placement& placement) { return out << to_string(placement); }

bool any_partial(const Placements& placements) {
  return std::any_of(placements.begin(), placements.end(), [](const Placement& p) { return p.is_partial(); });
}

Placements without_partial(Placements placements) {
  for (Placement& p : placements) {
    if (p.is_partial()) p = Replicate();
  }
  return placements;
}

bool all_replicate(const Placements& placements) {
  return std::all_of(placements.begin(), placements.end(), [](const Placement& p) { return p.is_replicate(); });
}

bool partials_commute(const Placements& placements) {
  const auto unmasked = [](const Placement& p) {  // a masked reduction counts as the one without a mask
    const auto& plain = p.reduction().unmasked();
    return plain ? Partial(plain) : p;
  };
  const auto linear = [](const Placement& p) { return p.reduction().slope(1).has_value(); };
  const auto first =
      std::find_if(placements.begin(), placements.end(), [](const Placement& p) { return p.is_partial(); });
  return std::all_of(first, placements.end(), [&](const Placement& p) {
    return !p.is_partial() || p == *first || (linear(p) && linear(*first)) || unmasked(p) == unmasked(*first);
  });
}

std::size_t hash_of(const Placements& placements) {
  std::size_t seed = placements.size();
  for (const Placement& p : placements) seed = c10::hash_combine(seed, p.hash());
  return seed;
}

}  // namespace tessera
