#include "tessera/mesh/backends/collective_arguments.h"

#include <cstring>
#include <map>
#include <stdexcept>
#include <string_view>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/mesh/core/in_memory.h"
#include "tessera/mesh/core/wire.h"

namespace tessera {
namespace {

using RedOp = c10d::ReduceOp::RedOpType;

const char* name_of(RedOp op) {
  switch (op) {
    case RedOp::SUM: return "sum";
    case RedOp::AVG: return "avg";
    case RedOp::PRODUCT: return "product";
    case RedOp::MIN: return "min";
    case RedOp::MAX: return "max";
    case RedOp::BAND: return "bitwise and";
    case RedOp::BOR: return "bitwise or";
    case RedOp::BXOR: return "bitwise xor";
    case RedOp::PREMUL_SUM: return "premultiplied sum";
    case RedOp::UNUSED: break;
  }
  return "no reduction";
}

std::string describe(const std::vector<Buffer>& buffers) {
  if (buffers.empty()) return "nothing";
  const at::Tensor& first = buffers.front().tensor;
  if (buffers.size() == 1 && buffers.front().whole) {
    return fmt::format("{} ({})", c10::toString(first.scalar_type()), fmt::join(first.sizes(), ", "));
  }
  std::vector<int64_t> counts;
  counts.reserve(buffers.size());
  for (const Buffer& buffer : buffers) counts.push_back(buffer.count);
  return fmt::format("{} x [{}]", c10::toString(first.scalar_type()), fmt::join(counts, ", "));
}

bool in_place(const CollectiveArguments& arguments) {
  return arguments.take.size() == 1 && arguments.take.front().whole &&
         (arguments.give.empty() || arguments.give.front().tensor.is_same(arguments.take.front().tensor));
}

// Returns the buffer that `giver` has for the rank at position `taker`.
const Buffer& buffer_for(const CollectiveArguments& giver, std::size_t taker) {
  return giver.give.size() == 1 ? giver.give.front() : giver.give[taker];
}

bool same_operation(const CollectiveArguments& a, const CollectiveArguments& b) {
  return std::string_view(a.kind) == b.kind && a.op == b.op && a.root == b.root;
}

// Returns whether the values are one run of bytes in the host's memory.
bool is_plain(const at::Tensor& tensor) { return tensor.is_cpu() && tensor.is_contiguous() && is_in_memory(tensor); }

char* start_of(const Buffer& buffer) {
  return static_cast<char*>(buffer.tensor.data_ptr()) + buffer.offset * buffer.tensor.element_size();
}

at::Tensor as_tensor(const Buffer& buffer) {
  return buffer.whole ? buffer.tensor : buffer.tensor.reshape({-1}).narrow(0, buffer.offset, buffer.count);
}

std::string first_misfit(const std::vector<CollectiveArguments>& all, const std::vector<int64_t>& ranks) {
  const auto refuse = [&](std::size_t giver, std::size_t taker, const std::string& text) {
    return fmt::format("rank {} gives rank {} {}", ranks[giver], ranks[taker], text);
  };
  for (std::size_t taker = 0; taker < all.size(); ++taker) {
    const std::vector<Buffer>& take = all[taker].take;
    for (std::size_t i = 0; i < all.size() && !take.empty(); ++i) {
      const bool from_root = !all[i].op && take.size() == 1 && all[taker].root >= 0;
      const std::size_t giver = from_root ? static_cast<std::size_t>(all[taker].root) : i;
      const std::string text = misfit(buffer_for(all[giver], taker), take.size() == 1 ? take.front() : take[i]);
      if (!text.empty()) return refuse(giver, taker, text);
      if (from_root) break;
    }
  }
  return {};
}

std::string first_fault(const std::vector<CollectiveArguments>& all, const std::vector<int64_t>& ranks) {
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!all[i].fault.empty()) return fmt::format("rank {}: {}", ranks[i], all[i].fault);
    if (!same_operation(all[0], all[i])) {
      return fmt::format("ranks {} and {} issue different operations", ranks[0], ranks[i]);
    }
  }
  return first_misfit(all, ranks);
}

void add_in(at::Tensor& sum, const at::Tensor& next, RedOp op) {
  switch (op) {
    case RedOp::SUM:
    case RedOp::AVG: sum.add_(next); return;
    case RedOp::PRODUCT: sum.mul_(next); return;
    case RedOp::MIN: at::minimum_out(sum, sum, next); return;
    case RedOp::MAX: at::maximum_out(sum, sum, next); return;
    case RedOp::BAND: sum.bitwise_and_(next); return;
    case RedOp::BOR: sum.bitwise_or_(next); return;
    case RedOp::BXOR: sum.bitwise_xor_(next); return;
    case RedOp::PREMUL_SUM:
    case RedOp::UNUSED: break;
  }
  throw std::invalid_argument(fmt::format(
      "{} is not among the reductions of ranks that are threads: sum, avg, product, min, max, bitwise and, or, xor",
      name_of(op)));
}

at::Tensor reduced_for(const std::vector<CollectiveArguments>& all, std::size_t taker, RedOp op) {
  const Buffer& first = buffer_for(all[0], taker);
  if (op == RedOp::AVG && c10::isIntegralType(first.tensor.scalar_type(), /*includeBool=*/true)) {
    throw std::invalid_argument(fmt::format("avg of {} is not defined; use sum and divide, or a floating dtype",
                                            c10::toString(first.tensor.scalar_type())));
  }
  // Floats of 16 bits are added in float32 and rounded once, as sum_rows does.
  const at::ScalarType given = first.tensor.scalar_type();
  const bool widens = (op == RedOp::SUM || op == RedOp::AVG) && (given == at::kBFloat16 || given == at::kHalf);
  at::Tensor sum = as_tensor(first).to(widens ? at::kFloat : given, /*non_blocking=*/false, /*copy=*/true,
                                       at::MemoryFormat::Contiguous);
  for (std::size_t i = 1; i < all.size(); ++i) add_in(sum, as_tensor(buffer_for(all[i], taker)), op);
  if (op == RedOp::AVG) sum = divide_by_count(sum, static_cast<int64_t>(all.size()));
  return sum.to(given);
}

void carry_out_reduction(const std::vector<CollectiveArguments>& all, RedOp op) {
  const bool same_for_all = all[0].give.size() == 1;
  Buffer result;
  for (std::size_t taker = 0; taker < all.size(); ++taker) {
    if (all[taker].take.empty()) continue;
    // An all_reduce writes to the tensors that it reads, so it is reduced once, before the first write.
    if (!same_for_all || !result.tensor.defined()) result = whole_buffer(reduced_for(all, taker, op));
    copy_buffer(result, all[taker].take.front());
  }
}

}  // namespace

Buffer whole_buffer(const at::Tensor& tensor) { return {tensor, 0, tensor.numel(), true}; }

std::string to_string(const CollectiveArguments& arguments) {
  std::string text = arguments.kind;
  if (arguments.op) text += fmt::format(" {}", name_of(*arguments.op));
  if (arguments.root >= 0) text += fmt::format(" with root {}", arguments.root);
  if (!arguments.fault.empty() || (arguments.give.empty() && arguments.take.empty())) return text;
  if (in_place(arguments)) return fmt::format("{} of {}", text, describe(arguments.take));
  return fmt::format("{}, gives {}, takes {}", text, describe(arguments.give), describe(arguments.take));
}

std::string misfit(const Buffer& give, const Buffer& take) {
  const bool shapes = give.whole && take.whole;
  const bool fits = give.tensor.scalar_type() == take.tensor.scalar_type() && give.count == take.count &&
                    (!shapes || give.tensor.sizes() == take.tensor.sizes());
  if (fits) return {};
  if (shapes) return fmt::format("{} but {} is expected", describe({give}), describe({take}));
  return fmt::format("{} elements of {} but {} of {} are expected", give.count,
                     c10::toString(give.tensor.scalar_type()), take.count, c10::toString(take.tensor.scalar_type()));
}

void copy_buffer(const Buffer& give, const Buffer& take) {
  if (give.count == 0) return;
  if (!is_plain(give.tensor) || !is_plain(take.tensor)) {
    const at::Tensor to = as_tensor(take);
    to.copy_(as_tensor(give).reshape(to.sizes()));
    return;
  }
  const char* const from = start_of(give);
  char* const to = start_of(take);
  if (from != to) std::memcpy(to, from, static_cast<std::size_t>(give.count * give.tensor.element_size()));
}

std::string mismatch(const std::vector<CollectiveArguments>& arguments, const std::vector<int64_t>& ranks) {
  const std::string reason = first_fault(arguments, ranks);
  if (reason.empty()) return {};
  std::map<std::string, std::vector<int64_t>> by_text;
  for (std::size_t i = 0; i < ranks.size(); ++i) by_text[to_string(arguments[i])].push_back(ranks[i]);
  std::string text = reason;
  for (const auto& [what, who] : by_text) text += fmt::format("; ranks [{}]: {}", fmt::join(who, ", "), what);
  return text;
}

void carry_out(const std::vector<CollectiveArguments>& arguments) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (arguments[0].op) return carry_out_reduction(arguments, *arguments[0].op);
  for (std::size_t taker = 0; taker < arguments.size(); ++taker) {
    const auto& [kind, op, root, give, take, fault] = arguments[taker];
    for (std::size_t i = 0; i < take.size(); ++i) {
      const std::size_t giver = take.size() == 1 && root >= 0 ? static_cast<std::size_t>(root) : i;
      copy_buffer(buffer_for(arguments[giver], taker), take[i]);
    }
  }
}

}  // namespace tessera
