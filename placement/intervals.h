#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace tessera {

// A part of one dimension, half-open, in elements.
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
  friend bool operator==(const Interval&, const Interval&) = default;
};

// A set of elements of one dimension: ascending, disjoint, none empty, none touching the next. {} holds nothing.
using Intervals = std::vector<Interval>;

// The interval alone, or nothing when it is empty.
Intervals one_interval(int64_t begin, int64_t end);
// Appends to ascending `intervals`, joining what touches. Empty intervals are passed over.
void append(Intervals& intervals, Interval next);

int64_t count(const Intervals& intervals);
// The elements in both; how many there are.
Intervals intersect(const Intervals& a, const Intervals& b);
int64_t overlap(const Intervals& a, const Intervals& b);

// The elements of `whole` at `positions` of it, counting from 0 in ascending order.
//   whole {[10, 14), [20, 24)}, positions {[3, 6)} -> {[13, 14), [20, 22)}
Intervals select(const Intervals& whole, const Intervals& positions);
// The reverse: where the elements of `part`, all of them in `whole`, stand in it.
Intervals positions(const Intervals& whole, const Intervals& part);

// "0-4"; "0-4+8-12", "-" for nothing.
std::ostream& operator<<(std::ostream& out, const Interval& interval);
std::string to_string(const Intervals& intervals);

}  // namespace tessera
