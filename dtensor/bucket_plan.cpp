#include "tessera/dtensor/bucket_plan.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

namespace tessera {

std::string to_string(const ArrivalOrder& order) {
  std::string text;
  for (const ArrivingGradient& each : order) {
    text += fmt::format("{} {} {}\n", each.parameter, each.pending, each.arrivals);
  }
  return text;
}

ArrivalOrder parse_arrivals(std::string_view text) {
  ArrivalOrder order;
  std::istringstream lines{std::string(text)};
  for (std::string line; std::getline(lines, line);) {
    ArrivingGradient each;
    std::istringstream words(line);
    if (!(words >> each.parameter >> each.pending >> each.arrivals)) {
      throw std::runtime_error(fmt::format("'{}' does not describe a gradient", line));
    }
    order.push_back(std::move(each));
  }
  return order;
}

ArrivalOrder agreed_order(const std::vector<ArrivalOrder>& by_rank) {
  ArrivalOrder agreed;
  std::map<std::size_t, std::size_t> index;  // parameter -> index in `agreed`
  for (const ArrivalOrder& order : by_rank) {
    for (const ArrivingGradient& each : order) {
      const auto [at, is_new] = index.emplace(each.parameter, agreed.size());
      if (is_new) agreed.push_back(each);
      ArrivingGradient& known = agreed[at->second];
      known.arrivals = std::max(known.arrivals, each.arrivals);
    }
  }
  return agreed;
}

BucketPlan plan_buckets(const ArrivalOrder& order, int64_t bucket_bytes,
                        const std::function<std::string(const ArrivingGradient&)>& kind_of,
                        const std::function<int64_t(const ArrivingGradient&)>& bytes_of) {
  struct Bucket {
    ArrivalOrder gradients;
    int64_t bytes = 0;
    std::size_t last = 0;  // the index in `order` of its last gradient
  };
  std::vector<Bucket> buckets;
  std::map<std::string, std::size_t> open;  // kind -> index of the bucket that takes more
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::string kind = kind_of(order[i]);
    if (kind.empty()) continue;
    const int64_t bytes = bytes_of(order[i]);
    const auto found = open.find(kind);
    if (found == open.end() || buckets[found->second].bytes + bytes > bucket_bytes) {
      open[kind] = buckets.size();
      buckets.emplace_back();
    }
    Bucket& bucket = buckets[open.at(kind)];
    bucket.gradients.push_back(order[i]);
    bucket.bytes += bytes;
    bucket.last = i;
  }
  std::ranges::sort(buckets, {}, &Bucket::last);
  BucketPlan plan;
  for (Bucket& bucket : buckets) plan.push_back(std::move(bucket.gradients));
  return plan;
}

}  // namespace tessera
