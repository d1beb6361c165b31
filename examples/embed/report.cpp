#include "tessera/examples/embed/report.h"

#include <algorithm>
#include <cstddef>

#include <fmt/format.h>

#include "tessera/examples/embed/utf8.h"

namespace embed {
namespace {

constexpr int64_t kSentenceWidth = 48;
constexpr float kTolerance = 1e-5F;

// Returns the blanks that pad `text` to `width` characters. fmt counts characters too, but only with a locale set.
std::string padding(const std::string& text, std::size_t width) {
  const std::size_t length = decode_utf8(text).size();
  return std::string(width > length ? width - length : 0, ' ');
}

// Returns rows of equally many cells as text. Each column is as wide as its widest cell.
std::string columns(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(row.size());
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], decode_utf8(row[i]).size());
  }
  std::string out;
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      out += "  " + row[i];
      if (i + 1 < row.size()) out += padding(row[i], widths[i]);
    }
    out.erase(out.find_last_not_of(' ') + 1);
    out += '\n';
  }
  return out;
}

}  // namespace

std::vector<int64_t> nearest(const Matrix& similarities) {
  std::vector<int64_t> found(similarities.size(), -1);
  for (std::size_t i = 0; i < similarities.size(); ++i) {
    for (std::size_t j = 0; j < similarities.size(); ++j) {
      const bool first = found[i] < 0;
      if (j != i && (first || similarities[i][j] > similarities[i][static_cast<std::size_t>(found[i])])) {
        found[i] = static_cast<int64_t>(j);
      }
    }
  }
  return found;
}

std::string similarity_table(const std::vector<std::string>& sentences, const Matrix& similarities) {
  std::string out;
  for (std::size_t i = 0; i < sentences.size(); ++i)
    out += fmt::format("  {:>3}  {}\n", i + 1, shortened(sentences[i], 100));
  out += "\n     ";
  for (std::size_t i = 0; i < sentences.size(); ++i) out += fmt::format("{:>6}", i + 1);
  out += '\n';
  for (std::size_t i = 0; i < sentences.size(); ++i) {
    out += fmt::format("  {:>3}", i + 1);
    for (const float similarity : similarities[i]) out += fmt::format("{:>6.2f}", similarity);
    out += '\n';
  }
  return out;
}

std::string nearest_table(const std::vector<std::string>& sentences, const Matrix& similarities) {
  std::vector<std::vector<std::string>> rows;
  const std::vector<int64_t> found = nearest(similarities);
  for (std::size_t i = 0; i < sentences.size(); ++i) {
    const std::string sentence = shortened(sentences[i], kSentenceWidth);
    if (found[i] < 0) {
      rows.push_back({sentence, "->", "no other sentence", ""});
    } else {
      const auto other = static_cast<std::size_t>(found[i]);
      rows.push_back(
          {sentence, "->", shortened(sentences[other], kSentenceWidth), fmt::format("{:.2f}", similarities[i][other])});
    }
  }
  return columns(rows);
}

std::string weight_table(const std::vector<int64_t>& bytes_of_rank, int64_t one_process) {
  std::vector<std::vector<std::string>> rows = {{"one process", with_commas(one_process) + " bytes", ""}};
  for (std::size_t rank = 0; rank < bytes_of_rank.size(); ++rank) {
    const double share =
        one_process > 0 ? static_cast<double>(bytes_of_rank[rank]) / static_cast<double>(one_process) : 0.0;
    rows.push_back({fmt::format("rank {}", rank), with_commas(bytes_of_rank[rank]) + " bytes",
                    fmt::format("{:.1f}%", share * 100)});
  }
  return columns(rows);
}

std::string difference_line(float difference) {
  return fmt::format("largest difference from one process: {:.2g}", difference);
}

bool is_close_enough(float difference) { return difference <= kTolerance; }

std::string shortened(const std::string& text, int64_t width) {
  const std::u32string characters = decode_utf8(text);
  if (static_cast<int64_t>(characters.size()) <= width) return text;
  return encode_utf8(characters.substr(0, static_cast<std::size_t>(width - 1))) + "…";
}

std::string with_commas(int64_t number) {
  std::string digits = std::to_string(number);
  const std::size_t first = number < 0 ? 1 : 0;
  for (std::size_t at = digits.size(); at > first + 3;) digits.insert(at -= 3, ",");
  return digits;
}

}  // namespace embed
