#include "tessera/inspect/timeline.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include <fmt/format.h>

#include "tessera/inspect/lanes.h"
#include "tessera/inspect/svg.h"

namespace tessera {
namespace {

constexpr double kMargin = 10;
constexpr double kRow = 18;
constexpr double kGap = 10;  // between ranks
constexpr double kNarrow = 0.5;

// Returns a step of 1, 2 or 5 times a power of ten that divides `span` into at most ten.
double tick_of(double span) {
  const double power = std::pow(10, std::floor(std::log10(span / 10)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (span / (factor * power) <= 10) return factor * power;
  }
  return 10 * power;
}

class Timeline {
 public:
  Timeline(const std::vector<Lane>& lanes, const TimelineOptions& options) : lanes_(lanes), options_(options) {
    constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
    begin_ = options.begin_ns != 0 ? options.begin_ns : kNever;
    end_ = options.end_ns;
    for (const Lane& lane : lanes) {
      left_ = std::max(left_, kMargin + text_width(lane.name) + 8);
      for (const LaneSlice& slice : lane.slices) {
        if (options.begin_ns == 0) begin_ = std::min(begin_, slice.begin_ns);
        if (options.end_ns == 0) end_ = std::max(end_, slice.end_ns);
      }
    }
    if (begin_ == kNever) begin_ = end_;  // no lane has a slice
    end_ = std::max(end_, begin_ + 1);
    width_ = std::max(options.width, left_ + 1 + kMargin);
    scale_ = (width_ - left_ - kMargin) / static_cast<double>(end_ - begin_);
  }

  std::string draw() {
    if (lanes_.empty()) {
      svg_.text(kMargin, kMargin + kRow, "nothing was recorded");
      return svg_.finish(width_, 2 * kMargin + kRow, options_.title);
    }
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      if (i == 0 || lanes_[i - 1].rank != lanes_[i].rank) {
        y_ += (i == 0 ? 0 : kGap) + kRow;
        svg_.text(kMargin, y_ - 5, fmt::format("rank {}", lanes_[i].rank), "font-weight=\"bold\"");
      }
      draw(lanes_[i]);
    }
    draw_scale();
    return svg_.finish(width_, y_ + kMargin, options_.title);
  }

 private:
  double x_of(int64_t ns) const { return left_ + static_cast<double>(std::clamp(ns, begin_, end_) - begin_) * scale_; }

  // An open slice may begin and end at the edge of the picture; it is drawn there, since it goes on.
  bool is_outside(const LaneSlice& slice) const {
    if (slice.is_open) return slice.end_ns < begin_ || slice.begin_ns > end_;
    return slice.end_ns <= begin_ || slice.begin_ns >= end_;
  }

  void draw(const Lane& lane) {
    svg_.text(kMargin, y_ + kRow - 5, lane.name, "fill=\"#666\"");
    svg_.rect(left_, y_, width_ - left_ - kMargin, kRow - 2, "fill=\"#f4f4f4\"");
    double drawn_to = -1;
    for (const LaneSlice& slice : lane.slices) {
      if (is_outside(slice)) continue;
      const double end = x_of(slice.end_ns);
      const double x = slice.is_open ? std::min(x_of(slice.begin_ns), x_of(end_) - kNarrow) : x_of(slice.begin_ns);
      if (!slice.is_open && end - x < kNarrow && x - drawn_to < kNarrow) continue;
      drawn_to = end;
      bar(slice, x, std::max(kNarrow, end - x));
    }
    y_ += kRow;
  }

  void bar(const LaneSlice& slice, double x, double width) {
    const auto [found, is_new] = colors_.emplace(slice.name, colors_.size());
    const double ms = static_cast<double>(slice.end_ns - slice.begin_ns) / 1e6;
    svg_.rect(x, y_, width, kRow - 2,
              fmt::format("fill=\"{}\"{}", svg_color(found->second), width > 4 ? " stroke=\"#fff\"" : ""),
              fmt::format("{}, {:.3f} ms{}", slice.name, ms, slice.is_open ? ", has not ended" : ""));
    if (text_width(slice.name) + 6 <= width) svg_.text(x + 3, y_ + kRow - 6, slice.name);
  }

  void draw_scale() {
    const double span = static_cast<double>(end_ - begin_) / 1e6, tick = tick_of(span);
    y_ += 6;
    for (int i = 0; i * tick <= span; ++i) {
      const double x = left_ + i * tick * 1e6 * scale_;
      svg_.line(x, y_, x, y_ + 5, "stroke=\"#666\"");
      const std::string text = fmt::format("{:g} ms", i * tick);
      if (x + text_width(text) <= width_) svg_.text(x, y_ + kRow, text, "fill=\"#666\"");
    }
    y_ += kRow + 4;
  }

  const std::vector<Lane>& lanes_;
  const TimelineOptions& options_;
  int64_t begin_ = 0, end_ = 0;
  double width_ = 0, left_ = 0, scale_ = 1, y_ = kMargin;
  std::map<std::string, std::size_t> colors_;
  Svg svg_;
};

}  // namespace

std::string timeline_svg(const std::vector<Record>& records, const TimelineOptions& options) {
  const std::vector<Lane> lanes = lanes_of(records);
  return Timeline(lanes, options).draw();
}

}  // namespace tessera
