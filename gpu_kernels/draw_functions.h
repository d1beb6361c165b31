#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <type_traits>

#include "tessera/gpu_kernels/numbers.h"
#include "tessera/gpu_kernels/philox.h"

// These functions turn Philox's words into numbers. The host and the GPU share them, so that both draw the same.
namespace tessera::gpu {

using detail::philox;
using detail::PhiloxWords;

inline TESSERA_BOTH uint32_t low(uint64_t x) { return static_cast<uint32_t>(x); }
inline TESSERA_BOTH uint32_t high(uint64_t x) { return static_cast<uint32_t>(x >> 32); }

inline TESSERA_BOTH PhiloxWords words_of(uint64_t seed, uint64_t draw, uint64_t block) {
  return philox({low(block), high(block), low(draw), high(draw)}, {low(seed), high(seed)});
}

// Returns words[lane]. A GPU cannot index its registers, so it selects.
inline TESSERA_BOTH uint32_t word(const PhiloxWords& words, uint64_t lane) {
#ifdef __CUDA_ARCH__
  const uint32_t even = (lane & 2) != 0 ? words[2] : words[0];
  const uint32_t odd = (lane & 2) != 0 ? words[3] : words[1];
  return (lane & 1) != 0 ? odd : even;
#else
  return words[lane];
#endif
}

inline TESSERA_BOTH uint64_t word64(const PhiloxWords& words, uint64_t lane) {
  return (static_cast<uint64_t>(word(words, 2 * lane + 1)) << 32) | word(words, 2 * lane);
}

// ---- arithmetic that is the same on both

// Is how many numbers share the words of one block.
template <class T>
inline constexpr int kLanes = std::is_same_v<T, double> ? 2 : 4;

// Return a + b * c, rounded after each of the two steps.
inline TESSERA_BOTH float sum_of_product(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, __fmul_rn(b, c));
#else
  return a + b * c;
#endif
}
inline TESSERA_BOTH double sum_of_product(double a, double b, double c) {
#ifdef __CUDA_ARCH__
  return __dadd_rn(a, __dmul_rn(b, c));
#else
  return a + b * c;
#endif
}

// ---- how words become numbers

// Returns a number in [0, 1), in steps that T represents exactly everywhere there.
template <class T>
TESSERA_BOTH Computed<T> unit(const PhiloxWords& words, uint64_t lane) {
  if constexpr (std::is_same_v<T, double>) {
    return static_cast<double>(word64(words, lane) >> 11) * 0x1p-53;
  } else {
    constexpr float kStep = 1.0F / (1 << kDigits<T>);
    return static_cast<float>(word(words, lane) >> (32 - kDigits<T>)) * kStep;
  }
}

struct SineAndCosine {
  float sine;
  float cosine;
};

// Returns those of an angle in [0, 7], with an error of up to 2^-21 of each. CUDA's own functions have a second way for
// large angles, and each would reduce the angle anew. The polynomials, for up to an eighth of a turn, are those of
// Moshier's Cephes library (1989).
inline TESSERA_BOTH SineAndCosine sine_and_cosine(float angle) {
  constexpr float kQuarter = 0x1.921fb6p+0F;  // pi / 2, and what is left of it
  constexpr float kQuarterRest = -0x1.777a5cp-25F;
  const float quarters = std::rint(angle * (1 / kQuarter));
  const float x = std::fma(quarters, -kQuarterRest, std::fma(quarters, -kQuarter, angle));
  const float z = x * x;
  const float of_sine = std::fma(std::fma(-1.9515295891e-4F, z, 8.3321608736e-3F), z, -1.6666654611e-1F);
  const float of_cosine =
      std::fma(std::fma(2.443315711809948e-5F, z, -1.388731625493765e-3F), z, 4.166664568298827e-2F);
  const float sine = std::fma(of_sine * z, x, x);
  const float cosine = std::fma(of_cosine * z, z, std::fma(-0.5F, z, 1.0F));
  const int turns = static_cast<int>(quarters);
  const bool swapped = (turns & 1) != 0;
  const float first = swapped ? cosine : sine;
  const float second = swapped ? sine : cosine;
  return {(turns & 2) != 0 ? -first : first, ((turns + 1) & 2) != 0 ? -second : second};
}

// Returns the square root of a float, on a GPU by the fast way, with an error of up to one unit in its last place.
inline TESSERA_BOTH float root(float x) {
#ifdef __CUDA_ARCH__
  float out;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
#else
  return std::sqrt(x);
#endif
}

// Makes two normal numbers, for lanes 2i and 2i+1, of two uniform ones in (0, 1] and [0, 1), by the method of Box and
// Muller (1958).
template <class T>
TESSERA_BOTH Computed<T> normal(const PhiloxWords& words, uint64_t lane) {
  using C = Computed<T>;
  C radius2;
  C turn;
  if constexpr (std::is_same_v<T, double>) {
    radius2 = -2 * std::log(static_cast<double>((word64(words, 0) >> 11) + 1) * 0x1p-53);
    turn = static_cast<double>(word64(words, 1) >> 11) * 0x1p-53;
  } else {
    const uint64_t pair = lane / 2 * 2;
    radius2 = -2 * std::log((static_cast<float>(word(words, pair)) + 1) * 0x1p-32F);
    turn = static_cast<float>(word(words, pair + 1) >> 8) * 0x1p-24F;
  }
  const C angle = 2 * std::numbers::pi_v<C> * turn;
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<C, float>) {
    const SineAndCosine of_angle = sine_and_cosine(angle);
    return root(radius2) * (lane % 2 == 0 ? of_angle.cosine : of_angle.sine);
  }
#endif
  return std::sqrt(radius2) * (lane % 2 == 0 ? std::cos(angle) : std::sin(angle));
}

// Is the smallest positive number of T.
template <class T>
inline constexpr double kSmallest = std::is_same_v<T, double> ? 0x1p-1074
                                    : !kIsShortFloat<T>       ? 0x1p-149
                                    : kDigits<T> == 11        ? 0x1p-24  // float16
                                                              : 0x1p-133;       // bfloat16

// Returns a number in (0, 1), without either end.
inline TESSERA_BOTH double open_unit(const PhiloxWords& words, uint64_t lane) {
  return (static_cast<double>(word64(words, lane) >> 12) + 0.5) * 0x1p-52;
}

// Decides an event of `probability` for lane `lane`.
inline TESSERA_BOTH bool chance(const PhiloxWords& words, uint64_t lane, double probability) {
  return static_cast<double>(word(words, lane)) * 0x1p-32 < probability;
}

// Returns how many of the 2^32 words mean that an event of `probability` happens: chance() is word < bound.
inline uint64_t bound_of(double probability) {
  if (!(probability > 0)) return 0;
  return probability >= 1 ? uint64_t{1} << 32 : static_cast<uint64_t>(std::ceil(probability * 0x1p32));
}

// Returns floor(count * word / 2^64), which is uniform up to a bias of 2^-64 * count; returns `word` if count is 0.
// Source: Lemire (ACM TOMACS 2019), without its rejection.
inline TESSERA_BOTH uint64_t below(uint64_t word, uint64_t count) {
#ifdef __CUDA_ARCH__
  return count == 0 ? word : __umul64hi(word, count);
#else
  using Wide = unsigned __int128;
  return count == 0 ? word : static_cast<uint64_t>((static_cast<Wide>(word) * count) >> 64);
#endif
}

// ---- the distributions

// make(words, lane, i) is the number of lane `lane` of a block of kPerBlock numbers, and is number i of the piece.
// kReads says whether it depends on i.

template <class T>
class Uniform {
 public:
  using Value = T;
  static constexpr int kPerBlock = kLanes<T>;
  static constexpr bool kReads = false;

  Uniform(double from, double to)
      : first_(static_cast<C>(from)), span_(static_cast<C>(to - from)), end_(static_cast<C>(number<T>(to))) {}

  TESSERA_BOTH T operator()(const PhiloxWords& words, uint64_t lane, int64_t) const {
    const T value = number<T>(sum_of_product(first_, span_, unit<T>(words, lane)));
    return static_cast<C>(value) < end_ ? value : number<T>(first_);  // the product was rounded up to the end
  }

 private:
  using C = Computed<T>;
  C first_;
  C span_;
  C end_;
};

template <class T>
class Normal {
 public:
  using Value = T;
  static constexpr int kPerBlock = kLanes<T>;
  static constexpr bool kReads = false;

  Normal(double mean, double deviation) : mean_(static_cast<C>(mean)), deviation_(static_cast<C>(deviation)) {}

  TESSERA_BOTH T operator()(const PhiloxWords& words, uint64_t lane, int64_t) const {
    return number<T>(sum_of_product(mean_, deviation_, normal<T>(words, lane)));
  }

 private:
  using C = Computed<T>;
  C mean_;
  C deviation_;
};

template <class T>
class Exponential {
 public:
  using Value = T;
  static constexpr int kPerBlock = 2;
  static constexpr bool kReads = false;

  explicit Exponential(double rate) : rate_(rate) {}

  TESSERA_BOTH T operator()(const PhiloxWords& words, uint64_t lane, int64_t) const {
    const double exact = -std::log(open_unit(words, lane)) / rate_;
    // A positive number stays one: float16 would round one in millions to 0, whose logarithm users take.
    return number<T>(exact < kSmallest<T> && rate_ < HUGE_VAL ? kSmallest<T> : exact);
  }

 private:
  double rate_;
};

template <class T>
class Integers {
 public:
  using Value = T;
  static constexpr int kPerBlock = 2;
  static constexpr bool kReads = false;

  Integers(int64_t first, uint64_t range) : first_(static_cast<uint64_t>(first)), range_(range) {}

  TESSERA_BOTH T operator()(const PhiloxWords& words, uint64_t lane, int64_t) const {
    return number<T>(static_cast<int64_t>(first_ + below(word64(words, lane), range_)));
  }

 private:
  uint64_t first_;
  uint64_t range_;
};

template <class T>
class Bernoulli {
 public:
  using Value = T;
  static constexpr int kPerBlock = 4;
  static constexpr bool kReads = false;

  explicit Bernoulli(double probability) : bound_(bound_of(probability)) {}

  TESSERA_BOTH T operator()(const PhiloxWords& words, uint64_t lane, int64_t) const {
    return number<T>(word(words, lane) < bound_);
  }

 private:
  uint64_t bound_;
};

template <class T>
class BernoulliEach {
 public:
  using Value = T;
  static constexpr int kPerBlock = 4;
  static constexpr bool kReads = true;

  explicit BernoulliEach(const double* probabilities) : probabilities_(probabilities) {}

  TESSERA_BOTH T operator()(const PhiloxWords& words, uint64_t lane, int64_t i) const {
    return number<T>(chance(words, lane, probabilities_[i]));
  }

 private:
  const double* probabilities_;
};

}  // namespace tessera::gpu
