#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#ifdef __CUDACC__
#define TESSERA_BOTH __host__ __device__
#else
#define TESSERA_BOTH
#endif

#ifdef __CUDA_ARCH__
#define TESSERA_UNROLL _Pragma("unroll")
#else
#define TESSERA_UNROLL
#endif

// All kernels use these types of numbers, and these ways to read and write several at once. Functions that are
// TESSERA_BOTH are compiled for the host and for a GPU.
namespace tessera::gpu {

// Is the number of binary digits of T's values; a specialization gives it for each type that the library lacks.
template <class T>
inline constexpr int kDigits = std::numeric_limits<T>::digits;
// Says whether T is a floating-point type of 16 bits.
template <class T>
inline constexpr bool kIsShortFloat = !std::is_integral_v<T> && sizeof(T) == 2;

// Is the type that T's numbers are computed in.
template <class T>
using Computed = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Converts as LibTorch does: to 16 bits by way of float, each time to the nearest value.
template <class T, class From>
TESSERA_BOTH T number(From x) {
  if constexpr (kIsShortFloat<T>) {
    return static_cast<T>(static_cast<float>(x));
  } else {
    return static_cast<T>(x);
  }
}

#ifdef __CUDA_ARCH__
// Is the widest word by which a GPU reads or writes `kBytes` neighbouring bytes.
template <int kBytes>
using WordFor = std::conditional_t<
    kBytes % 16 == 0, uint4,
    std::conditional_t<kBytes % 8 == 0, uint2, std::conditional_t<kBytes % 4 == 0, uint32_t, uint16_t>>>;

#endif

// Reads and stores N neighbouring numbers by as few instructions as there can be. `at` must be aligned to all of them,
// up to 16 bytes.
template <int N, class T>
TESSERA_BOTH void load(T (&values)[N], const T* at) {
#ifdef __CUDA_ARCH__
  using Word = WordFor<N * sizeof(T)>;
  static_assert(N * sizeof(T) % sizeof(Word) == 0);
  Word words[N * sizeof(T) / sizeof(Word)];
  TESSERA_UNROLL
  for (std::size_t i = 0; i < N * sizeof(T) / sizeof(Word); ++i) words[i] = reinterpret_cast<const Word*>(at)[i];
  memcpy(values, words, N * sizeof(T));
#else
  for (int i = 0; i < N; ++i) values[i] = at[i];
#endif
}
template <int N, class T>
TESSERA_BOTH void store(T* at, const T (&values)[N]) {
#ifdef __CUDA_ARCH__
  using Word = WordFor<N * sizeof(T)>;
  static_assert(N * sizeof(T) % sizeof(Word) == 0);
  Word words[N * sizeof(T) / sizeof(Word)];
  memcpy(words, values, N * sizeof(T));
  TESSERA_UNROLL
  for (std::size_t i = 0; i < N * sizeof(T) / sizeof(Word); ++i) reinterpret_cast<Word*>(at)[i] = words[i];
#else
  for (int i = 0; i < N; ++i) at[i] = values[i];
#endif
}

// Do the same for the numbers from `first` on of `count` ones. Some of the N may lie before the first one or behind the
// last: these are read as `missing`, and not written. `aligned` says whether `at` + `first` is aligned to N.
template <int N, class T>
TESSERA_BOTH void load_group(T (&values)[N], const T* at, int64_t first, int64_t count, bool aligned, T missing) {
  if (aligned && first >= 0 && first + N <= count) {
    load(values, at + first);
    return;
  }
  TESSERA_UNROLL
  for (int i = 0; i < N; ++i) values[i] = first + i >= 0 && first + i < count ? at[first + i] : missing;
}
template <int N, class T>
TESSERA_BOTH void store_group(T* at, const T (&values)[N], int64_t first, int64_t count, bool aligned) {
  if (aligned && first >= 0 && first + N <= count) {
    store(at + first, values);
    return;
  }
  TESSERA_UNROLL
  for (int i = 0; i < N; ++i) {
    if (first + i >= 0 && first + i < count) at[first + i] = values[i];
  }
}

// Divides, in 32 bits where the numbers allow it.
inline TESSERA_BOTH uint64_t quotient(uint64_t a, uint64_t b) {
  return ((a | b) >> 32) == 0 ? uint64_t{static_cast<uint32_t>(a) / static_cast<uint32_t>(b)} : a / b;
}

// Is what a GPU copies by one instruction.
struct alignas(16) WideWord {
  uint64_t first;
  uint64_t second;
};

// Returns the size in bytes of the widest word by which memory can be copied: all addresses, and all distances in
// bytes, must be multiples of it.
template <class... Numbers>
int word_bytes(Numbers... multiples) {
  const uint64_t all = (uint64_t{16} | ... | static_cast<uint64_t>(multiples));
  return static_cast<int>(all & (~all + 1));
}
inline uint64_t address(const void* at) { return reinterpret_cast<uintptr_t>(at); }

// Calls run(Word{}) with the type of a word of `bytes`, a result of word_bytes.
template <class Run>
auto with_word(int bytes, const Run& run) {
  switch (bytes) {
    case 16: return run(WideWord{});
    case 8: return run(uint64_t{});
    case 4: return run(uint32_t{});
    case 2: return run(uint16_t{});
    default: return run(uint8_t{});
  }
}

// Says whether memory is aligned to that many numbers, up to 16 bytes.
template <class T>
inline bool is_aligned(const T* at, int numbers) {
  const uint64_t bytes = numbers * sizeof(T);
  return reinterpret_cast<uintptr_t>(at) % (bytes < 16 ? bytes : 16) == 0;
}

}  // namespace tessera::gpu
