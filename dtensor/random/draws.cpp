#include "tessera/dtensor/random/draws.h"

#include <cmath>
#include <limits>
#include <numbers>
#include <stdexcept>
#include <type_traits>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/FunctionRef.h>
#include <fmt/format.h>

#include "tessera/dtensor/random/philox.h"
#include "tessera/mesh/core/in_memory.h"

namespace tessera::detail {
namespace {

// Is the draw number of keys that a caller's generator gives; no world's counter reaches it.
constexpr uint64_t kOfGenerator = std::numeric_limits<uint64_t>::max();

uint32_t low(uint64_t x) { return static_cast<uint32_t>(x); }
uint32_t high(uint64_t x) { return static_cast<uint32_t>(x >> 32); }

PhiloxWords words_of(DrawKey key, uint64_t block) {
  return philox({low(block), high(block), low(key.draw), high(key.draw)}, {low(key.seed), high(key.seed)});
}

uint64_t word64(const PhiloxWords& words, uint64_t lane) {
  return (static_cast<uint64_t>(words[2 * lane + 1]) << 32) | words[2 * lane];
}

// ---- the elements that a rank holds

// Is called as run(first element in the global tensor, first element in the piece, count) for each stretch of elements
// that are adjacent in both, in row-major order; each element counts as `width` numbers.
using Run = c10::function_ref<void(int64_t global, int64_t local, int64_t count)>;

// Visits the stretches in the dimensions from `dim` on. The dimensions behind `last` are whole, and make `inner`
// numbers per index of `last`. `prefix` is the row-major index in the dimensions before `dim`.
void visit_stretches(const Spec& spec, std::size_t dim, std::size_t last, int64_t inner, int64_t prefix, int64_t& local,
                     Run run) {
  for (const Interval& part : spec.tile[dim]) {
    const int64_t first = prefix * spec.sizes[dim] + part.begin;
    if (dim == last) {
      run(first * inner, local, part.size() * inner);
      local += part.size() * inner;
      continue;
    }
    for (int64_t i = 0; i < part.size(); ++i) visit_stretches(spec, dim + 1, last, inner, first + i, local, run);
  }
}

void each_stretch(const Spec& spec, int64_t width, Run run) {
  std::size_t cut = spec.tile.size();
  int64_t inner = width;
  while (cut > 0 && count(spec.tile[cut - 1]) == spec.sizes[cut - 1]) inner *= spec.sizes[--cut];
  int64_t local = 0;
  if (cut == 0) {
    run(0, 0, inner);
  } else {
    visit_stretches(spec, 0, cut - 1, inner, 0, local, run);
  }
}

// Sets out[i] = make(words, lane, i): `lanes` neighbouring numbers of the global tensor share the words of one block.
template <class T, class Make>
void fill(T* out, const Spec& spec, DrawKey key, uint64_t lanes, int64_t width, const Make& make) {
  constexpr int64_t kGrain = 1 << 14;
  each_stretch(spec, width, [&](int64_t global, int64_t local, int64_t count) {
    at::parallel_for(0, count, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end;) {
        const auto at = static_cast<uint64_t>(global + i);
        const PhiloxWords words = words_of(key, at / lanes);
        for (uint64_t lane = at % lanes; lane < lanes && i < end; ++lane, ++i) {
          out[local + i] = static_cast<T>(make(words, lane, local + i));
        }
      }
    });
  });
}

// Calls make_all with a row-major tensor in host memory, and copies the result to `out` where that is not `out` itself.
void on_host(const at::Tensor& out, c10::function_ref<void(const at::Tensor&)> make_all) {
  if (out.numel() == 0) return;
  const bool direct = out.is_cpu() && out.is_contiguous() && is_in_memory(out);
  const at::Tensor host = direct ? out : at::empty(out.sizes(), at::TensorOptions(out.scalar_type()));
  make_all(host);
  if (!direct) out.copy_(host);
}

// Does the same for floating-point dtypes; a complex number is passed as two real ones.
void on_host_real(const at::Tensor& out, c10::function_ref<void(const at::Tensor&, int64_t width)> make_all) {
  on_host(out, [&](const at::Tensor& host) {
    if (host.is_complex()) {
      make_all(at::view_as_real(host), 2);
    } else {
      make_all(host, 1);
    }
  });
}

// ---- how words become numbers

// Name the type that T's numbers are computed in, and how many numbers share the words of one block.
template <class T>
using Computed = std::conditional_t<std::is_same_v<T, double>, double, float>;
template <class T>
constexpr uint64_t kLanes = std::is_same_v<T, double> ? 2 : 4;

// Returns a number in [0, 1), in steps that T represents exactly everywhere there.
template <class T>
Computed<T> unit(const PhiloxWords& words, uint64_t lane) {
  if constexpr (std::is_same_v<T, double>) {
    return static_cast<double>(word64(words, lane) >> 11) * 0x1p-53;
  } else {
    constexpr int kDigits = std::numeric_limits<T>::digits;
    constexpr float kStep = 1.0F / (1 << kDigits);
    return static_cast<float>(words[lane] >> (32 - kDigits)) * kStep;
  }
}

// Makes two normal numbers, for lanes 2i and 2i+1, of two uniform ones in (0, 1] and [0, 1), by the method of Box and
// Muller.
template <class T>
Computed<T> normal(const PhiloxWords& words, uint64_t lane) {
  using C = Computed<T>;
  C radius2;
  C turn;
  if constexpr (std::is_same_v<T, double>) {
    radius2 = -2 * std::log(static_cast<double>((word64(words, 0) >> 11) + 1) * 0x1p-53);
    turn = static_cast<double>(word64(words, 1) >> 11) * 0x1p-53;
  } else {
    const uint64_t pair = lane / 2 * 2;
    radius2 = -2 * std::log((static_cast<float>(words[pair]) + 1) * 0x1p-32F);
    turn = static_cast<float>(words[pair + 1] >> 8) * 0x1p-24F;
  }
  const C angle = 2 * std::numbers::pi_v<C> * turn;
  return std::sqrt(radius2) * (lane % 2 == 0 ? std::cos(angle) : std::sin(angle));
}

// Returns a number in (0, 1), without either end.
double open_unit(const PhiloxWords& words, uint64_t lane) {
  return (static_cast<double>(word64(words, lane) >> 12) + 0.5) * 0x1p-52;
}

// Decides an event of `probability` for lane `lane`.
bool chance(const PhiloxWords& words, uint64_t lane, double probability) {
  return static_cast<double>(words[lane]) * 0x1p-32 < probability;
}

// Returns floor(count * word / 2^64), which is uniform up to a bias of 2^-64 * count; returns `word` if count is 0.
// Source: Lemire (ACM TOMACS 2019), without its rejection.
uint64_t below(uint64_t word, uint64_t count) {
  using Wide = unsigned __int128;
  return count == 0 ? word : static_cast<uint64_t>((static_cast<Wide>(word) * count) >> 64);
}

}  // namespace

DrawKey next_draw(World& world, const std::optional<at::Generator>& user) {
  RandomState& state = world.random_state();
  if (!user || !user->defined()) return {.seed = state.seed, .draw = state.counter++};
  const at::Tensor word = at::empty({}, at::TensorOptions(at::kLong).device(user->device()));
  word.random_(std::numeric_limits<int64_t>::min(), std::nullopt, user);
  return {.seed = static_cast<uint64_t>(word.item<int64_t>()), .draw = kOfGenerator};
}

// Uses a block that no element has.
uint64_t seed_of(DrawKey key) { return word64(words_of(key, std::numeric_limits<uint64_t>::max()), 0); }

void draw_uniform(const at::Tensor& out, const Spec& spec, DrawKey key, double from, double to) {
  on_host_real(out, [&](const at::Tensor& host, int64_t width) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, host.scalar_type(), "draw_uniform", [&] {
      using C = Computed<scalar_t>;
      const C first = static_cast<C>(from);
      const C span = static_cast<C>(to - from);
      const auto end = static_cast<scalar_t>(to);
      fill(host.data_ptr<scalar_t>(), spec, key, kLanes<scalar_t>, width,
           [&](const PhiloxWords& words, uint64_t lane, int64_t) {
             const auto value = static_cast<scalar_t>(first + span * unit<scalar_t>(words, lane));
             return value < end ? value : static_cast<scalar_t>(first);  // the product was rounded up to the end
           });
    });
  });
}

void draw_normal(const at::Tensor& out, const Spec& spec, DrawKey key, double mean, double deviation) {
  on_host_real(out, [&](const at::Tensor& host, int64_t width) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, host.scalar_type(), "draw_normal", [&] {
      using C = Computed<scalar_t>;
      // The real and the imaginary part share the variance.
      const C scale = static_cast<C>(width == 2 ? deviation / std::numbers::sqrt2 : deviation);
      const C middle = static_cast<C>(mean);
      fill(host.data_ptr<scalar_t>(), spec, key, kLanes<scalar_t>, width,
           [&](const PhiloxWords& words, uint64_t lane, int64_t) {
             return middle + scale * normal<scalar_t>(words, lane);
           });
    });
  });
}

void draw_exponential(const at::Tensor& out, const Spec& spec, DrawKey key, double rate) {
  on_host(out, [&](const at::Tensor& host) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, host.scalar_type(), "draw_exponential", [&] {
      fill(host.data_ptr<scalar_t>(), spec, key, 2, 1,
           [&](const PhiloxWords& words, uint64_t lane, int64_t) { return -std::log(open_unit(words, lane)) / rate; });
    });
  });
}

void draw_integers(const at::Tensor& out, const Spec& spec, DrawKey key, int64_t first, uint64_t count) {
  on_host(out, [&](const at::Tensor& host) {
    AT_DISPATCH_ALL_TYPES_AND3(at::kBool, at::kHalf, at::kBFloat16, host.scalar_type(), "draw_integers", [&] {
      fill(host.data_ptr<scalar_t>(), spec, key, 2, 1, [&](const PhiloxWords& words, uint64_t lane, int64_t) {
        return static_cast<int64_t>(static_cast<uint64_t>(first) + below(word64(words, lane), count));
      });
    });
  });
}

void draw_bernoulli(const at::Tensor& out, const Spec& spec, DrawKey key, double probability) {
  on_host(out, [&](const at::Tensor& host) {
    AT_DISPATCH_ALL_TYPES_AND3(at::kBool, at::kHalf, at::kBFloat16, host.scalar_type(), "draw_bernoulli", [&] {
      fill(host.data_ptr<scalar_t>(), spec, key, 4, 1,
           [&](const PhiloxWords& words, uint64_t lane, int64_t) { return chance(words, lane, probability); });
    });
  });
}

void draw_bernoulli(const at::Tensor& out, const Spec& spec, DrawKey key, const at::Tensor& probability) {
  on_host(out, [&](const at::Tensor& host) {
    const at::Tensor wanted =
        probability.expand(out.sizes()).to(at::TensorOptions(at::kDouble).device(at::kCPU)).contiguous();
    const double* const p = wanted.const_data_ptr<double>();
    for (int64_t i = 0; i < wanted.numel(); ++i) {
      if (p[i] >= 0 && p[i] <= 1) continue;
      throw std::out_of_range(fmt::format("bernoulli: {} is no probability; give numbers from 0 to 1", p[i]));
    }
    AT_DISPATCH_ALL_TYPES_AND3(at::kBool, at::kHalf, at::kBFloat16, host.scalar_type(), "draw_bernoulli", [&] {
      fill(host.data_ptr<scalar_t>(), spec, key, 4, 1,
           [&](const PhiloxWords& words, uint64_t lane, int64_t i) { return chance(words, lane, p[i]); });
    });
  });
}

}  // namespace tessera::detail
