#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "tessera/dtensor/core/spec.h"
#include "tessera/gpu_kernels/interface.h"
#include "tessera/mesh/world.h"
#include "tessera/placement/layout.h"

namespace tessera::detail {

// Identifies one random operator's draw. An element's numbers depend only on it and on the element's row-major position
// in the global tensor, so they are the same on any mesh and with any sharding.
struct DrawKey {
  uint64_t seed = 0;
  uint64_t draw = 0;               // the number of draws since the seed was set
  const uint64_t* base = nullptr;  // on a GPU: is added to `draw` there; the host cannot draw with one
};

// Returns the world's next key and advances its counter by one; with a caller's generator, a key made of 64 bits that
// it draws. Every rank calls it for every draw, even if it holds no part of the result.
DrawKey next_draw(World& world, const std::optional<at::Generator>& user = std::nullopt);

// While it lives, it notes every World from which this thread takes a key, with the World's state before the first one.
// They nest: an outer one notes what an inner one does.
class DrawLog {
 public:
  struct Entry {
    std::shared_ptr<World> world;
    RandomState before;
  };
  DrawLog();
  ~DrawLog();
  DrawLog(const DrawLog&) = delete;
  DrawLog& operator=(const DrawLog&) = delete;
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  friend DrawKey next_draw(World& world, const std::optional<at::Generator>& user);
  void note(World& world);

  DrawLog* const outer_;
  std::vector<Entry> entries_;
};

// Returns a seed for a LibTorch generator that draws in place of these functions.
uint64_t seed_of(DrawKey key);

// Says which elements of a global tensor of `sizes` a tensor has. It refers to what it was made of.
struct DrawnPart {
  DrawnPart(std::span<const int64_t> global_sizes, const Tile& part) : sizes(global_sizes), tile(part) {}
  DrawnPart(const Spec& spec) : sizes(spec.sizes), tile(spec.tile) {}  // NOLINT: a rank's piece is a part

  std::span<const int64_t> sizes;
  const Tile& tile;
};

// Fill `out`, this rank's piece of a tensor of `spec`, without communication. On a GPU with our kernels they are made
// there, by the current stream, and nothing waits; std::runtime_error says that a kernel could not be started.
// Elsewhere, and with a tensor of probabilities, they are made on the host, and copied where `out` is on another
// device. The numbers are the same, but for the rounding of logarithm, root, sine and cosine. Dtypes that LibTorch
// cannot draw throw c10::NotImplementedError as there, also where `out` has no elements.
void draw_uniform(const at::Tensor& out, const Spec& spec, DrawKey key, double from, double to);  // [from, to)
void draw_normal(const at::Tensor& out, const Spec& spec, DrawKey key, double mean,
                 double deviation);                                                        // Box, Muller (1958)
void draw_exponential(const at::Tensor& out, const Spec& spec, DrawKey key, double rate);  // (0, inf)
void draw_integers(const at::Tensor& out, const Spec& spec, DrawKey key, int64_t first,
                   uint64_t count);  // count 0: all 2^64
// Draws 1 or 0. The part may be less than a rank's piece.
void draw_bernoulli(const at::Tensor& out, const DrawnPart& part, DrawKey key, double probability);
// `probability` has the layout of `out`. Throws std::out_of_range when one of its elements is outside [0, 1].
void draw_bernoulli(const at::Tensor& out, const Spec& spec, DrawKey key, const at::Tensor& probability);

struct Dropped {
  at::Tensor result;
  at::Tensor mask;  // bool
};
// Keeps each element of `input`, a piece of a tensor of `spec`, with probability `kept`, and divides those that are
// kept by it; the others become zeros. The mask is draw_bernoulli's. On a GPU one kernel of ours does both where it has
// the dtype and `input` is row-major; elsewhere a draw and a product do.
Dropped draw_dropout(const at::Tensor& input, const Spec& spec, DrawKey key, double kept);
// Returns what that kernel is told, with tensors of any device, or nullopt where it cannot do it.
std::optional<gpu::Dropout> dropout_request(const at::Tensor& input, const Dropped& to, const Spec& spec, DrawKey key,
                                            double kept);

}  // namespace tessera::detail
