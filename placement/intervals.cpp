#include "tessera/placement/intervals.h"

#include <algorithm>
#include <ostream>

#include <fmt/format.h>

namespace tessera {
namespace {

// Calls `visit` with each interval of the intersection, in ascending order.
template <typename Visit>
void for_each_common(const Intervals& a, const Intervals& b, const Visit& visit) {
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const Interval common = {.begin = std::max(a[i].begin, b[j].begin), .end = std::min(a[i].end, b[j].end)};
    if (common.size() > 0) visit(common);
    if (a[i].end < b[j].end) {
      ++i;
    } else {
      ++j;
    }
  }
}

}  // namespace

Intervals one_interval(int64_t begin, int64_t end) {
  if (begin >= end) return {};
  return {{.begin = begin, .end = end}};
}

void append(Intervals& intervals, Interval next) {
  if (next.size() <= 0) return;
  if (!intervals.empty() && intervals.back().end == next.begin) {
    intervals.back().end = next.end;
  } else {
    intervals.push_back(next);
  }
}

int64_t count(const Intervals& intervals) {
  int64_t sum = 0;
  for (const Interval& interval : intervals) sum += interval.size();
  return sum;
}

Intervals intersect(const Intervals& a, const Intervals& b) {
  Intervals out;
  for_each_common(a, b, [&](const Interval& common) { append(out, common); });
  return out;
}

int64_t overlap(const Intervals& a, const Intervals& b) {
  int64_t sum = 0;
  for_each_common(a, b, [&](const Interval& common) { sum += common.size(); });
  return sum;
}

Intervals select(const Intervals& whole, const Intervals& positions) {
  Intervals out;
  std::size_t i = 0;
  int64_t start = 0;  // the position of whole[i]'s first element
  for (Interval wanted : positions) {
    while (wanted.size() > 0 && i < whole.size()) {
      const int64_t end = start + whole[i].size();
      if (wanted.begin >= end) {
        start = end;
        ++i;
        continue;
      }
      const int64_t last = std::min(wanted.end, end);
      append(out, {.begin = whole[i].begin + wanted.begin - start, .end = whole[i].begin + last - start});
      wanted.begin = last;
    }
  }
  return out;
}

Intervals positions(const Intervals& whole, const Intervals& part) {
  Intervals out;
  std::size_t i = 0;
  int64_t start = 0;
  for_each_common(whole, part, [&](const Interval& common) {
    for (; whole[i].end <= common.begin; ++i) start += whole[i].size();
    append(out, {.begin = start + common.begin - whole[i].begin, .end = start + common.end - whole[i].begin});
  });
  return out;
}

std::ostream& operator<<(std::ostream& out, const Interval& interval) {
  return out << interval.begin << '-' << interval.end;
}

std::string to_string(const Intervals& intervals) {
  if (intervals.empty()) return "-";
  std::string out;
  for (const Interval& interval : intervals) {
    out += fmt::format("{}{}-{}", out.empty() ? "" : "+", interval.begin, interval.end);
  }
  return out;
}

}  // namespace tessera
