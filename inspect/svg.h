#pragma once

#include <string>
#include <string_view>

namespace tessera {

// Collects the parts of one SVG picture, in pixels. It is a value.
class Svg {
 public:
  // `title` is what a screen reader reads, and what is shown while the mouse is over the rectangle.
  void rect(double x, double y, double width, double height, std::string_view style, std::string_view title = "");
  void line(double x1, double y1, double x2, double y2, std::string_view style);
  // Begins at x, or is centred there with "text-anchor=\"middle\"" in `style`.
  void text(double x, double y, std::string_view text, std::string_view style = "");
  // Returns the whole picture, on white, so that it can be read on dark pages too.
  std::string finish(double width, double height, std::string_view title) const;

 private:
  std::string body_;
};

// Returns the text with <, >, & and quotes written as XML does. Bytes that are no UTF-8, and characters that XML
// refuses or changes (control characters other than tab and newline, U+FFFE and U+FFFF), become U+FFFD.
std::string xml_text(std::string_view text);
// Returns the width in pixels that a text of the picture's font may take.
double text_width(std::string_view text);
// Returns a light colour for the i-th of any number of things; colours of near numbers differ.
std::string svg_color(std::size_t i);

}  // namespace tessera
