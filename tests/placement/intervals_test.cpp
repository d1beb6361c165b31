#include "tessera/placement/intervals.h"

#include <random>
#include <set>

#include <doctest/doctest.h>

using namespace tessera;

namespace {

std::set<int64_t> elements(const Intervals& intervals) {
  std::set<int64_t> out;
  for (const Interval& interval : intervals) {
    for (int64_t i = interval.begin; i < interval.end; ++i) out.insert(i);
  }
  return out;
}

Intervals of(const std::set<int64_t>& elements) {
  Intervals out;
  for (const int64_t i : elements) append(out, {.begin = i, .end = i + 1});
  return out;
}

// Returns each element of `from` with a probability of a half.
std::set<int64_t> some_of(const std::set<int64_t>& from, std::mt19937& random) {
  std::set<int64_t> out;
  for (const int64_t i : from) {
    if (random() % 2 == 0) out.insert(i);
  }
  return out;
}

}  // namespace

TEST_CASE("interval arithmetic is that of sets of elements") {
  std::mt19937 random(20260102);
  std::set<int64_t> all;
  for (int64_t i = 0; i < 16; ++i) all.insert(i);
  for (int round = 0; round < 2000; ++round) {
    const std::set<int64_t> a = some_of(all, random);
    const std::set<int64_t> b = some_of(all, random);
    const std::set<int64_t> inside = some_of(a, random);
    CAPTURE(to_string(of(a)));
    CAPTURE(to_string(of(b)));
    std::set<int64_t> both;
    for (const int64_t i : a) {
      if (b.contains(i)) both.insert(i);
    }
    CHECK(elements(of(a)) == a);
    CHECK(count(of(a)) == static_cast<int64_t>(a.size()));
    CHECK(intersect(of(a), of(b)) == of(both));
    CHECK(overlap(of(a), of(b)) == static_cast<int64_t>(both.size()));
    // Finds the positions of `inside` among the elements of `a`, one by one.
    std::set<int64_t> places;
    int64_t place = 0;
    for (const int64_t i : a) {
      if (inside.contains(i)) places.insert(place);
      ++place;
    }
    CHECK(positions(of(a), of(inside)) == of(places));
    CHECK(select(of(a), of(places)) == of(inside));
  }
}

TEST_CASE("the text of intervals") {
  CHECK(to_string(Intervals{}) == "-");
  CHECK(to_string(Intervals{{0, 2}, {6, 8}}) == "0-2+6-8");
  CHECK(one_interval(3, 3).empty());
}
