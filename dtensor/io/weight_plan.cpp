#include "tessera/dtensor/io/weight_plan.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <variant>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tessera {
namespace {

using Sizes = std::vector<int64_t>;
using Loops = std::vector<Loop>;

int64_t product(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

int64_t count(const Loops& loops) {
  return std::accumulate(loops.begin(), loops.end(), int64_t{1},
                         [](int64_t all, const Loop& loop) { return all * loop.size; });
}

[[noreturn]] void throw_step(const std::string& problem, const Sizes& shape) {
  throw std::invalid_argument(fmt::format("{} of shape [{}]", problem, fmt::join(shape, ", ")));
}

std::size_t dimension(int64_t tensor_dim, const Sizes& shape) {
  const auto dims = static_cast<int64_t>(shape.size());
  if (tensor_dim < -dims || tensor_dim >= dims) throw_step(fmt::format("there is no dimension {}", tensor_dim), shape);
  return static_cast<std::size_t>(tensor_dim < 0 ? tensor_dim + dims : tensor_dim);
}

// Describes a range of the positions that loops count: its first position, the offset of that one's element, and the
// loops over the range.
struct Range {
  int64_t begin;
  int64_t offset;
  Loops loops;
};

// Splits positions [begin, end) of `loops` into as few ranges as possible, each with loops of its own. Positions count
// like numbers whose digits are the loops: a range that starts or ends within an inner loop needs its own ranges there.
std::vector<Range> ranges_of(const Loops& loops, int64_t begin, int64_t end) {
  if (begin >= end) return {};
  if (begin == 0 && end == count(loops)) return {{0, 0, loops}};
  const Loops inner(loops.begin() + 1, loops.end());
  const int64_t size = count(inner);
  std::vector<Range> ranges;
  const auto within = [&](int64_t digit, int64_t first, int64_t last) {
    for (Range& range : ranges_of(inner, first, last)) {
      ranges.push_back({digit * size + range.begin, digit * loops[0].stride + range.offset, std::move(range.loops)});
    }
  };
  if (begin / size == (end - 1) / size) {
    within(begin / size, begin % size, (end - 1) % size + 1);
    return ranges;
  }
  const int64_t first = (begin + size - 1) / size, last = end / size;
  if (begin % size != 0) within(begin / size, begin % size, size);
  if (first < last) {
    Loops middle = {{last - first, loops[0].stride}};
    middle.insert(middle.end(), inner.begin(), inner.end());
    ranges.push_back({first * size, first * loops[0].stride, std::move(middle)});
  }
  if (end % size != 0) within(last, 0, end % size);
  return ranges;
}

// Returns the parts of a block that lie in [begin, end) of a dimension of the described tensor.
std::vector<WeightBlock> cut(const WeightBlock& block, std::size_t dim, int64_t begin, int64_t end) {
  const int64_t start = block.box.offsets[dim], stop = start + block.box.sizes[dim];
  std::vector<WeightBlock> parts;
  for (Range& range : ranges_of(block.loops[dim], std::max(begin, start) - start, std::min(end, stop) - start)) {
    WeightBlock part = block;
    part.box.offsets[dim] = start + range.begin;
    part.box.sizes[dim] = count(range.loops);
    part.offset += range.offset;
    part.loops[dim] = std::move(range.loops);
    parts.push_back(std::move(part));
  }
  return parts;
}

WeightPlan narrowed(const WeightPlan& plan, std::size_t dim, int64_t begin, int64_t size) {
  WeightPlan result = {.shape = plan.shape, .blocks = {}};
  result.shape[dim] = size;
  for (const WeightBlock& block : plan.blocks) {
    for (WeightBlock& part : cut(block, dim, begin, begin + size)) {
      part.box.offsets[dim] -= begin;
      result.blocks.push_back(std::move(part));
    }
  }
  return result;
}

WeightPlan run(const WeightSource::Transpose& step, WeightPlan plan) {
  const std::size_t a = dimension(step.first, plan.shape), b = dimension(step.second, plan.shape);
  std::swap(plan.shape[a], plan.shape[b]);
  for (WeightBlock& block : plan.blocks) {
    std::swap(block.box.offsets[a], block.box.offsets[b]);
    std::swap(block.box.sizes[a], block.box.sizes[b]);
    std::swap(block.loops[a], block.loops[b]);
  }
  return plan;
}

WeightPlan run(const WeightSource::Narrow& step, const WeightPlan& plan) {
  const std::size_t dim = dimension(step.tensor_dim, plan.shape);
  if (step.begin < 0 || step.size < 0 || step.begin > plan.shape[dim] - step.size) {
    throw_step(fmt::format("elements [{}, {}) are not within dimension {}", step.begin, step.begin + step.size, dim),
               plan.shape);
  }
  return narrowed(plan, dim, step.begin, step.size);
}

WeightPlan run(const WeightSource::Split& step, const WeightPlan& plan) {
  const std::size_t dim = dimension(step.tensor_dim, plan.shape);
  if (step.parts < 1 || step.index < 0 || step.index >= step.parts || plan.shape[dim] % step.parts != 0) {
    throw_step(fmt::format("there is no part {} of {} equal parts along dimension {}", step.index, step.parts, dim),
               plan.shape);
  }
  const int64_t size = plan.shape[dim] / step.parts;
  return narrowed(plan, dim, step.index * size, size);
}

// Replaces -1 by what the other sizes leave of `whole`.
Sizes known_sizes(const WeightSource::Unflatten& step, std::size_t dim, const Sizes& shape) {
  Sizes sizes = step.sizes;
  int64_t known = 1;
  for (const int64_t size : sizes) known *= size == -1 ? 1 : size;
  const auto open = std::ranges::find(sizes, -1);
  if (open != sizes.end() && known > 0) *open = shape[dim] / known;
  if (sizes.empty() || std::ranges::any_of(sizes, [](int64_t size) { return size < 0; }) ||
      product(sizes) != shape[dim]) {
    throw_step(fmt::format("sizes {{{}}} do not multiply to dimension {}", fmt::join(step.sizes, ", "), dim), shape);
  }
  return sizes;
}

// Divides the loops over a dimension among the dimensions of `sizes` that it becomes. Throws where a loop would have to
// be divided between two dimensions at a position that does not divide it.
std::vector<Loops> divided(Loops loops, const Sizes& sizes) {
  std::vector<Loops> result(sizes.size());
  for (std::size_t d = sizes.size(); d-- > 0;) {
    int64_t needed = sizes[d];
    while (needed > 1) {
      Loop& last = loops.back();
      if (needed % last.size == 0) {
        needed /= last.size;
        result[d].insert(result[d].begin(), last);
        loops.pop_back();
      } else if (last.size % needed == 0) {
        result[d].insert(result[d].begin(), {needed, last.stride});
        last = {last.size / needed, last.stride * needed};
        needed = 1;
      } else {
        throw std::invalid_argument(
            fmt::format("sizes {{{}}} cut across dimensions that were flattened before", fmt::join(sizes, ", ")));
      }
    }
  }
  return result;
}

// Returns the row-major loops of a tensor of `sizes` over itself: its positions as numbers with a digit per dimension.
Loops digits(const Sizes& sizes) {
  Loops loops(sizes.size());
  int64_t stride = 1;
  for (std::size_t d = sizes.size(); d-- > 0;) {
    loops[d] = {sizes[d], stride};
    stride *= sizes[d];
  }
  return loops;
}

// Finds the box of a tensor of `sizes` whose row-major positions are those of `range`, a range of digits(sizes).
TensorBox box_of(const Range& range, const Sizes& sizes) {
  TensorBox box = {.offsets = Sizes(sizes.size()), .sizes = Sizes(sizes.size(), 1)};
  int64_t rest = range.begin, inner = 1;
  for (std::size_t d = sizes.size(); d-- > 0;) {
    box.offsets[d] = rest % sizes[d];
    rest /= sizes[d];
    for (const Loop& loop : range.loops) {
      if (loop.stride == inner && sizes[d] > 1) box.sizes[d] *= loop.size;  // those of size 1 share a stride
    }
    inner *= sizes[d];
  }
  return box;
}

template <class Values>
void substitute(Values& values, std::size_t first, std::size_t last, const Values& by) {
  const auto begin = values.begin() + static_cast<std::ptrdiff_t>(first);
  values.insert(values.erase(begin, begin + static_cast<std::ptrdiff_t>(last - first + 1)), by.begin(), by.end());
}

WeightPlan run(const WeightSource::Unflatten& step, const WeightPlan& plan) {
  const std::size_t dim = dimension(step.tensor_dim, plan.shape);
  const Sizes sizes = known_sizes(step, dim, plan.shape);
  WeightPlan result = {.shape = plan.shape, .blocks = {}};
  substitute(result.shape, dim, dim, sizes);
  for (const WeightBlock& block : plan.blocks) {
    const int64_t begin = block.box.offsets[dim];
    for (const Range& range : ranges_of(digits(sizes), begin, begin + block.box.sizes[dim])) {
      const TensorBox box = box_of(range, sizes);
      for (WeightBlock& part : cut(block, dim, range.begin, range.begin + count(range.loops))) {
        if (part.box.sizes[dim] != product(box.sizes)) {
          throw std::invalid_argument(
              fmt::format("sizes {{{}}} cut across dimensions that were flattened before", fmt::join(sizes, ", ")));
        }
        substitute(part.loops, dim, dim, divided(part.loops[dim], box.sizes));
        substitute(part.box.offsets, dim, dim, box.offsets);
        substitute(part.box.sizes, dim, dim, box.sizes);
        result.blocks.push_back(std::move(part));
      }
    }
  }
  return result;
}

// Joins dimension `dim` of a block and the next one, of size `inner`. The block's positions are then one range only if
// it has all of the inner dimension, or one element of the outer one; else it becomes several blocks.
std::vector<WeightBlock> joined(const WeightBlock& block, std::size_t dim, int64_t inner) {
  if (block.box.sizes[dim] > 1 && block.box.sizes[dim + 1] < inner) {
    std::vector<WeightBlock> parts;
    for (int64_t i = 0; i < block.box.sizes[dim]; ++i) {
      const int64_t at = block.box.offsets[dim] + i;
      for (const WeightBlock& row : cut(block, dim, at, at + 1)) parts.push_back(joined(row, dim, inner).front());
    }
    return parts;
  }
  WeightBlock result = block;
  Loops loops = block.loops[dim];
  loops.insert(loops.end(), block.loops[dim + 1].begin(), block.loops[dim + 1].end());
  substitute(result.loops, dim, dim + 1, {merged_loops(loops)});
  substitute(result.box.offsets, dim, dim + 1, {block.box.offsets[dim] * inner + block.box.offsets[dim + 1]});
  substitute(result.box.sizes, dim, dim + 1, {block.box.sizes[dim] * block.box.sizes[dim + 1]});
  return {result};
}

WeightPlan run(const WeightSource::Flatten& step, const WeightPlan& plan) {
  const std::size_t first = dimension(step.first, plan.shape), last = dimension(step.last, plan.shape);
  if (first > last) throw_step(fmt::format("dimension {} is after {}", first, last), plan.shape);
  WeightPlan result = plan;
  for (std::size_t d = last; d-- > first;) {  // the innermost two first
    std::vector<WeightBlock> blocks;
    for (const WeightBlock& block : result.blocks) {
      for (WeightBlock& part : joined(block, d, result.shape[d + 1])) blocks.push_back(std::move(part));
    }
    substitute(result.shape, d, d + 1, {result.shape[d] * result.shape[d + 1]});
    result.blocks = std::move(blocks);
  }
  return result;
}

WeightPlan of_file(const std::string& name, const Sizes& shape) {
  WeightBlock block = {.file_name = name, .box = whole_box(shape), .offset = 0, .loops = {}};
  for (const Loop& loop : digits(shape)) block.loops.push_back({loop});
  WeightPlan plan = {.shape = shape, .blocks = {}};
  if (product(shape) > 0) plan.blocks.push_back(std::move(block));
  return plan;
}

WeightPlan fused(const WeightSource& source, const ShapeOf& shape_of) {
  WeightPlan result = plan_weight(source.parts().front(), shape_of);
  const std::size_t dim = dimension(source.fused_dim(), result.shape);
  for (std::size_t i = 1; i < source.parts().size(); ++i) {
    WeightPlan next = plan_weight(source.parts()[i], shape_of);
    Sizes fitting = result.shape;
    if (next.shape.size() == fitting.size()) fitting[dim] = next.shape[dim];
    if (next.shape != fitting) {
      throw_step(fmt::format("part {} of shape [{}] cannot follow parts along dimension {}", i,
                             fmt::join(next.shape, ", "), dim),
                 result.shape);
    }
    for (WeightBlock& block : next.blocks) {
      block.box.offsets[dim] += result.shape[dim];
      result.blocks.push_back(std::move(block));
    }
    result.shape[dim] += next.shape[dim];
  }
  return result;
}

// Returns all loops of a block with the dimension and level of each, sorted by stride, the largest first.
struct NumberedLoop {
  Loop loop;
  int64_t number;  // among the block's loops, in the order of its dimensions
};
std::vector<NumberedLoop> sorted_loops(const WeightBlock& block) {
  std::vector<NumberedLoop> all;
  for (const Loops& loops : block.loops) {
    for (const Loop& loop : loops) all.push_back({loop, static_cast<int64_t>(all.size())});
  }
  std::ranges::stable_sort(all,
                           [](const NumberedLoop& a, const NumberedLoop& b) { return a.loop.stride > b.loop.stride; });
  return all;
}

}  // namespace

WeightPlan plan_weight(const WeightSource& source, const ShapeOf& shape_of) {
  WeightPlan plan =
      source.parts().empty() ? of_file(source.file_name(), shape_of(source.file_name())) : fused(source, shape_of);
  for (const WeightSource::Step& step : source.steps()) {
    plan = std::visit([&](const auto& each) { return run(each, plan); }, step);
  }
  return plan;
}

WeightPlan part_of_plan(const WeightPlan& plan, const TensorBox& box) {
  WeightPlan result = plan;
  for (std::size_t d = 0; d < plan.shape.size(); ++d) result = narrowed(result, d, box.offsets[d], box.sizes[d]);
  return result;
}

std::vector<Loop> loops_in_file(const WeightBlock& block) {
  Loops loops;
  for (const NumberedLoop& each : sorted_loops(block)) loops.push_back(each.loop);
  return merged_loops(loops);
}

ElementRuns runs_of(const WeightBlock& block) { return runs_of_loops(block.offset, loops_in_file(block)); }

at::Tensor arranged(const WeightBlock& block, const at::Tensor& packed) {
  const std::vector<NumberedLoop> sorted = sorted_loops(block);
  Sizes sizes, order(sorted.size());
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    sizes.push_back(sorted[i].loop.size);
    order[static_cast<std::size_t>(sorted[i].number)] = static_cast<int64_t>(i);
  }
  return packed.view(sizes).permute(order).reshape(block.box.sizes);
}

bool in_file_order(const WeightBlock& block) {
  return std::ranges::is_sorted(sorted_loops(block), {}, &NumberedLoop::number);
}

}  // namespace tessera
