#include "tessera/examples/train/report.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <string_view>
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
:root { color-scheme: light dark; --line: #2563a8; --other: #c2570c; --faint: #8888; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
.chart { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
.chart text { fill: currentColor; }
pre { overflow-x: auto; padding: .8rem; border: 1px solid var(--faint); border-radius: 4px; font-size: 13px; }
.scroll { overflow-x: auto; }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem; } figure { margin: 0; max-width: 100%; }
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
  return fmt::format("<svg class='chart' viewBox='0 0 {} {}' role='img' aria-label='{}'>{}</svg>", kWidth, height,
                     label, body);
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

// Returns the text of a mark, of which two are never the same: a quarter of `most` tokens lies between them.
std::string tokens_text(double tokens, double most) {
  return most < 4000 ? fmt::format("{:g}", tokens) : fmt::format("{:.0f}k", tokens / 1000);
}

std::string axes(const Scale& x, const Scale& y) {
  std::string out =
      fmt::format(R"(<path d="M{0} {1}V{2}H{3}" fill="none" stroke="currentColor"/>)", kLeft, y.to, y.from, x.to);
  constexpr int kMarks = 4;
  for (int i = 0; i <= kMarks; ++i) {
    const double tokens = x.least + (x.most - x.least) * i / kMarks, bits = y.least + (y.most - y.least) * i / kMarks;
    out += text_at(x(tokens), y.from + 16, tokens_text(tokens, x.most));
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

// ---- Pictures that the library has drawn

// Returns the picture without the name of SVG's namespace, which HTML does not need: the page has no address.
std::string inlined(std::string svg) {
  constexpr std::string_view kNamespace = " xmlns=\"http://www.w3.org/2000/svg\"";
  if (const std::size_t at = svg.find(kNamespace); at != std::string::npos) svg.erase(at, kNamespace.size());
  return svg;
}

std::string time_line(const std::string& svg) {
  if (svg.empty()) return "<p>This job ran no step.</p>";
  return "<div class=\"scroll\">" + inlined(svg) +
         "</div><p>Each row of a rank is a lane: parts of the step, the modules whose parameters are used, operators, "
         "and "
         "the collectives of each mesh dimension, of eight ranks at most. What is under the mouse is named; trace.json "
         "has the same step, for "
         "Perfetto.</p>";
}

std::string layout_pictures(const std::vector<ParameterLayout>& layouts) {
  std::string figures;
  for (const ParameterLayout& each : layouts) {
    const std::string others = each.others == 0 ? "" : fmt::format(", and {} more of this layout", each.others);
    figures += fmt::format("<figure class=\"scroll\"><figcaption>{}{}</figcaption>{}</figure>\n",
                           escaped(each.parameter), others, inlined(each.picture));
  }
  return "<p>A cell is a part of the parameter, and the numbers in it are the ranks that hold it.</p>"
         "<div class=\"pictures\">" +
         figures + "</div>";
}

}  // namespace

std::string to_html(const Report& report) {
  const std::string title = escaped(report.title);
  return kHead + fmt::format("<title>{0}</title></head><body>\n<h1>{0}</h1>\n", title) + preformatted(report.outcome) +
         section("Loss against tokens", loss_chart(report.metrics)) +
         section("The time line of a step", time_line(report.time_line)) +
         section("Collectives of this step, on rank 0", preformatted(report.collectives)) +
         section("What lies where", layout_pictures(report.layouts)) +
         section("What rank 0 holds", preformatted(report.weights)) +
         section("Text that the model wrote", preformatted(report.written)) +
         section("Options", preformatted(report.config)) + "</body></html>\n";
}

}  // namespace train
