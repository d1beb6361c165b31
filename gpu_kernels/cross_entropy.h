#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "tessera/gpu_kernels/interface.h"
#include "tessera/gpu_kernels/numbers.h"

// One thread of a GPU does this in the cross entropy of logits whose classes are cut. Tests call it on the host.
namespace tessera::gpu {

// Holds the greatest of some numbers x, and the sum of exp(x - greatest). That of no numbers is {-inf, 0}. Numbers that
// are all -inf have the sum 0, and where one is not a number or +inf, the sum is not a number.
template <class C>
struct ExpSum {
  C greatest = -std::numeric_limits<C>::infinity();
  C sum = 0;
};

// Returns the greater number, or what is not a number.
template <class C>
TESSERA_BOTH C greater_of(C a, C b) {
  return a > b || a != a ? a : b;
}

// Returns the sum of both relative to `greatest`, which is at least sum.greatest.
template <class C>
TESSERA_BOTH C relative_to(const ExpSum<C>& sum, C greatest) {
  return sum.greatest == greatest ? sum.sum : sum.sum * std::exp(sum.greatest - greatest);
}

template <class C>
TESSERA_BOTH ExpSum<C> merged(const ExpSum<C>& a, const ExpSum<C>& b) {
  const C greatest = greater_of(a.greatest, b.greatest);
  return {greatest, relative_to(a, greatest) + relative_to(b, greatest)};
}

// Adds N numbers to a sum.
template <int N, class T, class C>
TESSERA_BOTH void add_to(ExpSum<C>& sum, const T (&values)[N]) {
  C greatest = sum.greatest;
  TESSERA_UNROLL
  for (int i = 0; i < N; ++i) greatest = greater_of(greatest, static_cast<C>(values[i]));
  sum.sum = relative_to(sum, greatest);
  sum.greatest = greatest;
  if (greatest == -std::numeric_limits<C>::infinity()) return;
  TESSERA_UNROLL
  for (int i = 0; i < N; ++i) sum.sum += std::exp(static_cast<C>(values[i]) - greatest);
}

// A row is read in groups of 16 bytes that begin at multiples of 16 bytes. The first and the last group may have
// columns before and behind the row.
template <class T>
inline constexpr int kRowGroup = static_cast<int>(16 / sizeof(T));

// Returns how many numbers lie between the last multiple of 16 bytes and `row`.
template <class T>
TESSERA_BOTH int misaligned(const T* row) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
}

// Returns the sum over the groups of a row that are `thread` modulo `threads`. Two groups are read before either is
// used, so that a multiprocessor has enough readings under way.
template <class T>
TESSERA_BOTH ExpSum<Computed<T>> sum_of_row(const LogitSums& request, int64_t row, int thread, int threads) {
  constexpr int kGroup = kRowGroup<T>;
  const T* const at = static_cast<const T*>(request.logits) + row * request.stride;
  const int before = misaligned(at);
  const T missing = number<T>(-std::numeric_limits<float>::infinity());
  ExpSum<Computed<T>> sum;
  for (int64_t first = thread * kGroup - before; first < request.columns; first += 2 * threads * kGroup) {
    T values[2][kGroup];
    load_group(values[0], at, first, request.columns, /*aligned=*/true, missing);
    load_group(values[1], at, first + threads * kGroup, request.columns, /*aligned=*/true, missing);
    add_to(sum, values[0]);
    add_to(sum, values[1]);
  }
  return sum;
}

// Stores a row's results, of which `sum` is over all its columns.
template <class T>
TESSERA_BOTH void store_sums(const LogitSums& request, int64_t row, const ExpSum<Computed<T>>& sum) {
  using C = Computed<T>;
  const T* const at = static_cast<const T*>(request.logits) + row * request.stride;
  static_cast<C*>(request.greatest)[row] = sum.greatest;
  static_cast<C*>(request.exps)[row] = sum.sum;
  static_cast<C*>(request.picked)[row] = static_cast<C>(at[request.column[row]]);
}

// Writes those groups of a row's gradient that are `thread` modulo `threads`.
template <class T>
TESSERA_BOTH void gradient_of_row(const LogitGradient& request, int64_t row, int thread, int threads) {
  using C = Computed<T>;
  constexpr int kGroup = kRowGroup<T>;
  const T* const in = static_cast<const T*>(request.logits) + row * request.stride;
  T* const out = static_cast<T*>(request.out) + row * request.columns;
  const bool aligned = misaligned(in) == misaligned(out);
  const C greatest = static_cast<const C*>(request.greatest)[row];
  const C on_exps = static_cast<const C*>(request.on_exps)[row];
  const C on_column = static_cast<const C*>(request.on_column)[row];
  const bool kept = static_cast<const C*>(request.kept)[row] != 0;
  const int64_t column = request.column[row];
  for (int64_t first = thread * kGroup - misaligned(out); first < request.columns; first += threads * kGroup) {
    T values[kGroup];
    load_group(values, in, first, request.columns, aligned, T(0));
    TESSERA_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      C value = std::exp(static_cast<C>(values[i]) - greatest) * on_exps;
      if (first + i == column) value += on_column;
      values[i] = number<T>(kept ? value : C(0));
    }
    store_group(out, values, first, request.columns, /*aligned=*/true);
  }
}

}  // namespace tessera::gpu
