#include "tessera/examples/train/report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <utility>

#include <fmt/format.h>

#include "tessera/examples/train/printable.h"

namespace train {
namespace {

constexpr double kWidth = 720, kHeight = 300, kLeft = 60, kBottom = 40;

constexpr const char* kHead = R"(<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<style>
:root { color-scheme: light dark; --line: #2563a8; --other: #c2570c; --third: #3c8a3c; --faint: #8888; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: currentColor; }
pre { overflow-x: auto; padding: .8rem; border: 1px solid var(--faint); border-radius: 4px; font-size: 13px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr + tr td { border-top: 1px solid var(--faint); }
</style>
)";

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : printable(text)) {
    if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '&') {
      out += "&amp;";
    } else if (c == '"') {
      out += "&quot;";
    } else {
      out += c;
    }
  }
  return out;
}

std::string section(const std::string& title, const std::string& body) {
  return fmt::format("<h2>{}</h2>\n{}\n", title, body);
}

std::string preformatted(const std::string& text) { return "<pre>" + escaped(text) + "</pre>"; }

std::string svg(double height, const std::string& label, const std::string& body) {
  return fmt::format("<svg viewBox='0 0 {} {}' role='img' aria-label='{}'>{}</svg>", kWidth, height, label, body);
}

std::string text_at(double x, double y, const std::string& text, const char* anchor = "middle") {
  return fmt::format("<text x='{:.1f}' y='{:.1f}' text-anchor='{}'>{}</text>", x, y, anchor, escaped(text));
}

// Returns an entry of a legend.
std::string key(const char* color, const std::string& text) {
  return fmt::format("<span style='color:var({})'>&#9632;</span> {}", color, text);
}

// ---- Loss against tokens

struct Scale {
  double least = 0, most = 1;
  double from = 0, to = 1;

  double operator()(double value) const { return from + (value - least) / (most - least) * (to - from); }
};

using Points = std::vector<std::pair<double, double>>;  // tokens and bits per byte

std::string curve(const Points& points, const Scale& x, const Scale& y, const char* color, bool has_dots) {
  std::string path, dots;
  for (const auto& [tokens, bits] : points) {
    path += fmt::format("{:.1f},{:.1f} ", x(tokens), y(bits));
    dots += fmt::format("<circle cx='{:.1f}' cy='{:.1f}' r='3' fill='var({})'/>", x(tokens), y(bits), color);
  }
  return fmt::format("<polyline points='{}' fill='none' stroke='var({})' stroke-width='1.5'/>", path, color) +
         (has_dots ? dots : "");
}

std::string axes(const Scale& x, const Scale& y) {
  std::string out =
      fmt::format(R"(<path d="M{0} {1}V{2}H{3}" fill="none" stroke="currentColor"/>)", kLeft, y.to, y.from, x.to);
  constexpr int kMarks = 4;
  for (int i = 0; i <= kMarks; ++i) {
    const double tokens = x.least + (x.most - x.least) * i / kMarks, bits = y.least + (y.most - y.least) * i / kMarks;
    out += text_at(x(tokens), y.from + 16, fmt::format("{:.0f}k", tokens / 1000));
    out += text_at(kLeft - 6, y(bits) + 4, fmt::format("{:.2f}", bits), "end");
  }
  return out + text_at(kWidth / 2, y.from + 34, "tokens");
}

std::string loss_chart(const std::vector<Metric>& metrics) {
  Points training, held_out;
  double most_tokens = 1, least = 8, most = 0;
  for (const Metric& metric : metrics) {
    const double bits = metric.bits_per_byte.value_or(metric.loss / std::numbers::ln2);
    (metric.bits_per_byte ? held_out : training).emplace_back(static_cast<double>(metric.tokens), bits);
    most_tokens = std::max(most_tokens, static_cast<double>(metric.tokens));
    least = std::min(least, bits);
    most = std::max(most, bits);
  }
  if (most <= least) most = least + 1;
  const Scale x{.least = 0, .most = most_tokens, .from = kLeft, .to = kWidth - 40};
  const Scale y{.least = std::floor(least), .most = std::ceil(most), .from = kHeight - kBottom, .to = 20};
  const std::string body = axes(x, y) + curve(training, x, y, "--line", false) + curve(held_out, x, y, "--other", true);
  return svg(kHeight, "loss against tokens", body) + "<p>" + key("--line", "training batches") + ", " +
         key("--other", "held-out text") + ", in bits per byte</p>";
}

// ---- The time line of a step

constexpr std::array<const char*, 3> kPartColors = {"--line", "--other", "--third"};

std::string bar(double from, double to, double y, const char* color, const std::string& tip) {
  return fmt::format("<rect x='{:.1f}' y='{:.1f}' width='{:.1f}' height='18' fill='var({})'><title>{}</title></rect>",
                     from, y, std::max(0.5, to - from), color, escaped(tip));
}

std::string bars_of_rank(const StepTimes& times, const Scale& x, double y) {
  const std::array<std::pair<const char*, double>, 3> parts = {
      {{"forward", times.forward}, {"backward", times.backward}, {"optimizer", times.optimizer}}};
  std::string out;
  double begin = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto& [name, seconds] = parts[i];
    out += bar(x(begin), x(begin + seconds), y, kPartColors[i], fmt::format("{}: {:.1f} ms", name, 1000 * seconds));
    begin += seconds;
  }
  return out;
}

double seconds_of(const StepTimes& times) { return times.forward + times.backward + times.optimizer; }

std::string time_line(const Report& report) {
  double most = 1e-6;
  for (const StepTimes& times : report.times) most = std::max(most, seconds_of(times));
  for (const CollectiveMoment& moment : report.moments) most = std::max(most, moment.second);
  const Scale x{.least = 0, .most = most, .from = kLeft, .to = kWidth - 40};
  std::string body;
  double y = 10;
  for (std::size_t rank = 0; rank < report.times.size(); ++rank, y += 26) {
    body += text_at(kLeft - 6, y + 14, fmt::format("rank {}", rank), "end") + bars_of_rank(report.times[rank], x, y);
  }
  for (const CollectiveMoment& moment : report.moments) {
    body += fmt::format(
        "<path d='M{0:.1f} {1:.1f}v14' stroke='currentColor'><title>{2} over {3} at {4:.1f} ms</title></path>",
        x(moment.second), y, moment.kind, escaped(moment.mesh_dim), 1000 * moment.second);
  }
  if (!report.moments.empty()) body += text_at(kLeft - 6, y + 12, "sent", "end");
  for (int i = 0; i <= 4; ++i) body += text_at(x(most * i / 4), y + 32, fmt::format("{:.0f} ms", 250 * most * i));
  return svg(y + 40, "the time line of a step", body) + "<p>" + key("--line", "forward") + ", " +
         key("--other", "backward with the reduction of gradients") + ", " +
         key("--third", "clipping and the optimizer") + "; below, where each collective of rank 0 began</p>";
}

std::string collective_table(const std::vector<CollectiveCount>& collectives) {
  std::string rows = "<tr><th>kind</th><th>mesh dimension</th><th>count</th><th>bytes</th></tr>\n";
  for (const CollectiveCount& each : collectives) {
    rows += fmt::format("<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>\n", escaped(each.kind),
                        escaped(each.mesh_dim), each.count, each.bytes);
  }
  return "<div class=\"scroll\"><table>" + rows + "</table></div>";
}

}  // namespace

std::string to_html(const Report& report) {
  const std::string title = escaped(report.title);
  return kHead + fmt::format("<title>{0}</title></head><body>\n<h1>{0}</h1>\n", title) + preformatted(report.outcome) +
         section("Loss against tokens", loss_chart(report.metrics)) +
         section("The time line of a step", time_line(report)) +
         section("Collectives of a step, on rank 0", collective_table(report.collectives)) +
         section("What lies where: rank 0", preformatted(report.layout)) +
         section("Text that the model wrote", preformatted(report.written)) +
         section("Options", preformatted(report.config)) + "</body></html>\n";
}

}  // namespace train
