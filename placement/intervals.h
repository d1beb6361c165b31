#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace tessera {

// Holds the elements begin .. end - 1 of one dimension.
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
  friend bool operator==(const Interval&, const Interval&) = default;
};

// Describes a set of elements of one dimension. The intervals ascend, none is empty, and no two overlap or touch. {} is
// the empty set.
using Intervals = std::vector<Interval>;

// Returns the set that holds this interval, or the empty set if begin >= end.
Intervals one_interval(int64_t begin, int64_t end);
// Appends `next`, which must not begin before the last interval ends. Merges it with the last interval if they touch,
// and ignores it if it is empty.
void append(Intervals& intervals, Interval next);

int64_t count(const Intervals& intervals);
// Return the elements that are in both sets (intersect), or their number (overlap).
Intervals intersect(const Intervals& a, const Intervals& b);
int64_t overlap(const Intervals& a, const Intervals& b);

// Returns the elements of `whole` that stand at `positions`, which count the elements of `whole` in ascending order
// from 0.
//   whole {[10, 14), [20, 24)}, positions {[3, 6)} -> {[13, 14), [20, 22)}
Intervals select(const Intervals& whole, const Intervals& positions);
// Is the inverse of select: returns the positions in `whole` of the elements of `part`, all of which must be in
// `whole`.
Intervals positions(const Intervals& whole, const Intervals& part);

// Prints "0-4" for an interval, "0-4+8-12" for two, and "-" for the empty set.
std::ostream& operator<<(std::ostream& out, const Interval& interval);
std::string to_string(const Intervals& intervals);

}  // namespace tessera
