#pragma once

#include <algorithm>
#include <vector>

#include <ATen/ATen.h>

#include "tessera/dtensor/core/spec.h"
#include "tessera/dtensor/random/draws.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/layout.h"

// Pieces of tensors on which the kernels of random numbers are tested.
namespace tessera::testing {

struct Held {
  const char* name;
  std::vector<int64_t> sizes;
  Tile tile;
};

// Returns the indices that part `part` of `parts` holds of a dimension which is dealt out in blocks.
inline Intervals dealt(int64_t size, int64_t block, int64_t part, int64_t parts) {
  Intervals held;
  for (int64_t begin = part * block; begin < size; begin += parts * block) {
    append(held, {begin, std::min(begin + block, size)});
  }
  return held;
}

inline std::vector<Held> pieces() {
  const auto all = [](int64_t n) { return one_interval(0, n); };
  Intervals irregular;
  for (int64_t i = 0; i < 40; ++i) append(irregular, {i * 7 + i % 3, i * 7 + i % 3 + 1 + i % 4});
  return {
      {"a number", {}, {}},
      {"all", {5, 7}, {all(5), all(7)}},
      {"rows", {10, 7}, {one_interval(4, 7), all(7)}},
      {"the last rows, which are fewer", {10, 7}, {one_interval(9, 10), all(7)}},
      {"columns", {5, 7}, {all(5), one_interval(3, 6)}},
      {"one column", {9, 7}, {all(9), one_interval(6, 7)}},
      {"the middle dimension", {3, 8, 4}, {all(3), one_interval(2, 5), all(4)}},
      {"a corner", {6, 9, 5}, {one_interval(2, 4), one_interval(3, 9), one_interval(1, 4)}},
      {"two dimensions of one element", {1, 12, 1}, {all(1), one_interval(5, 12), all(1)}},
      {"blocks of rows", {23, 3}, {dealt(23, 2, 1, 3), all(3)}},
      {"blocks of columns", {4, 23}, {all(4), dealt(23, 3, 0, 2)}},
      {"blocks, the last of which is shorter", {4, 11, 2}, {all(4), dealt(11, 2, 2, 3), all(2)}},
      {"blocks of both", {17, 19}, {dealt(17, 2, 0, 2), dealt(19, 3, 1, 2)}},
      {"irregular intervals", {300}, {irregular}},
      {"irregular intervals of both", {30, 16}, {{{1, 2}, {4, 9}, {20, 21}}, {{0, 3}, {5, 6}, {14, 16}}}},
      {"many blocks", {4000, 2}, {dealt(4000, 1, 1, 2), all(2)}},
  };
}

inline Spec spec_of(const Held& held) {
  static const DeviceMesh mesh = init_device_mesh("cpu", {1}, {}, World::create({}));
  return {.mesh = mesh, .sizes = held.sizes, .tile = held.tile};
}

inline at::Tensor empty_piece(const Held& held, at::ScalarType dtype) {
  std::vector<int64_t> sizes;
  for (const Intervals& part : held.tile) sizes.push_back(count(part));
  return at::empty(sizes, dtype);
}

inline constexpr detail::DrawKey kKey = {.seed = (uint64_t{5} << 40) + 17, .draw = 3};

}  // namespace tessera::testing
