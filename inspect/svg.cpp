#include "tessera/inspect/svg.h"

#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace tessera {
namespace {

constexpr double kFontSize = 12;
constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// Two decimals, without zeros at the end.
std::string number(double value) { return fmt::format("{:g}", std::round(value * 100) / 100); }

// Returns the text as UTF-8 without U+FFFE and U+FFFF.
std::string as_utf8(std::string_view text) {
  using Json = nlohmann::json;
  const std::string written = Json(std::string(text)).dump(-1, ' ', false, Json::error_handler_t::replace);
  auto out = Json::parse(written).get<std::string>();
  for (const std::string_view refused : {"\xEF\xBF\xBE", "\xEF\xBF\xBF"}) {
    for (auto at = out.find(refused); at != std::string::npos; at = out.find(refused, at)) {
      out.replace(at, refused.size(), kReplacement);
    }
  }
  return out;
}

bool is_refused(char c) { return static_cast<unsigned char>(c) < 0x20 && c != '\t' && c != '\n'; }

}  // namespace

std::string xml_text(std::string_view text) {
  std::string out;
  for (const char c : as_utf8(text)) {
    if (is_refused(c)) {
      out += kReplacement;
      continue;
    }
    switch (c) {
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '&': out += "&amp;"; break;
      case '"': out += "&quot;"; break;
      default: out += c;
    }
  }
  return out;
}

double text_width(std::string_view text) { return 0.62 * kFontSize * static_cast<double>(text.size()); }

std::string svg_color(std::size_t i) {
  // The golden angle keeps the hues of any number of things apart.
  return fmt::format("hsl({},70%,80%)", static_cast<int>(std::fmod(205 + 137.508 * static_cast<double>(i), 360)));
}

void Svg::rect(double x, double y, double width, double height, std::string_view style, std::string_view title) {
  body_ += fmt::format("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" {}", number(x), number(y), number(width),
                       number(height), style);
  body_ += title.empty() ? "/>\n" : fmt::format("><title>{}</title></rect>\n", xml_text(title));
}

void Svg::line(double x1, double y1, double x2, double y2, std::string_view style) {
  body_ += fmt::format("<line x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\" {}/>\n", number(x1), number(y1), number(x2),
                       number(y2), style);
}

void Svg::text(double x, double y, std::string_view text, std::string_view style) {
  body_ += fmt::format("<text x=\"{}\" y=\"{}\"{}{}>{}</text>\n", number(x), number(y), style.empty() ? "" : " ", style,
                       xml_text(text));
}

std::string Svg::finish(double width, double height, std::string_view title) const {
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" role=\"img\" "
      "font-family=\"ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace\" font-size=\"{2}\" fill=\"#222\">\n"
      "<title>{3}</title>\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n{4}</svg>\n",
      number(width), number(height), kFontSize, xml_text(title), body_);
}

}  // namespace tessera
