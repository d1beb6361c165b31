#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "tessera/dtensor/core/spec.h"
#include "tessera/mesh/world.h"

namespace tessera::detail {

// What one random operator draws from. The numbers of an element depend on it and on the element's place in the global
// tensor (row-major) alone, so that they are the same on any mesh and however the tensor is sharded.
struct DrawKey {
  uint64_t seed = 0;
  uint64_t draw = 0;  // which draw since the seed
};

// The world's next, whose counter moves on by one; or, with a generator of the caller's, one of 64 bits that it draws.
// Every rank calls it for every draw, also one that has no part of the result.
DrawKey next_draw(World& world, const std::optional<at::Generator>& user = std::nullopt);

// For a generator of LibTorch's in the place of these numbers.
uint64_t seed_of(DrawKey key);

// `out` is this rank's piece of a tensor of `spec`, and is filled; no communication. Numbers are made on the host and
// copied where `out` lies elsewhere. Types that LibTorch does not draw throw c10::NotImplementedError as there.
void draw_uniform(const at::Tensor& out, const Spec& spec, DrawKey key, double from, double to);  // [from, to)
void draw_normal(const at::Tensor& out, const Spec& spec, DrawKey key, double mean,
                 double deviation);                                                        // Box, Muller (1958)
void draw_exponential(const at::Tensor& out, const Spec& spec, DrawKey key, double rate);  // (0, inf)
void draw_integers(const at::Tensor& out, const Spec& spec, DrawKey key, int64_t first,
                   uint64_t count);                                                             // count 0: all 2^64
void draw_bernoulli(const at::Tensor& out, const Spec& spec, DrawKey key, double probability);  // 1 or 0
// `probability` is laid out as `out` is. Throws std::out_of_range when one of them is outside [0, 1].
void draw_bernoulli(const at::Tensor& out, const Spec& spec, DrawKey key, const at::Tensor& probability);

}  // namespace tessera::detail
