#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// Describes the gradient of one parameter as it arrives in backward.
struct ArrivingGradient {
  std::size_t parameter = 0;  // an index
  // Has one character per mesh dimension: 's' where a sum is pending, 'a' where an average is, '-' where the gradient
  // has the layout that it will have in the end.
  std::string pending;
  int64_t arrivals = 1;  // in one backward: a checkpointed segment brings its own gradient of a tied parameter

  friend bool operator==(const ArrivingGradient&, const ArrivingGradient&) = default;
};

// Lists gradients in the order in which they are complete.
using ArrivalOrder = std::vector<ArrivingGradient>;

// Returns one line per gradient, such as "12 s- 1", and reads it again. The second function throws std::runtime_error
// on any other text.
std::string to_string(const ArrivalOrder& order);
ArrivalOrder parse_arrivals(std::string_view text);

// Returns the order that all ranks use, given the order of each: that of the first rank, then what only the others have
// seen. Of a parameter the first rank that has seen it says what is pending, and the most arrivals count.
ArrivalOrder agreed_order(const std::vector<ArrivalOrder>& by_rank);

// Lists the gradients of each bucket. Buckets are reduced in this order, which is that of their last gradients.
using BucketPlan = std::vector<ArrivalOrder>;

// Puts gradients that the same collectives reduce into buckets of at most `bucket_bytes` (a larger gradient gets one of
// its own). `kind_of` names these collectives, or returns "" for a gradient that needs none and gets no bucket. Both
// functions must return the same on every rank.
BucketPlan plan_buckets(const ArrivalOrder& order, int64_t bucket_bytes,
                        const std::function<std::string(const ArrivingGradient&)>& kind_of,
                        const std::function<int64_t(const ArrivingGradient&)>& bytes_of);

}  // namespace tessera
