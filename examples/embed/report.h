#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace embed {

// The texts that the main job prints, made apart from the work so that they are tested without any. Each ends its lines
// with '\n'.

using Matrix = std::vector<std::vector<float>>;

// For each row the other row that it is most like (the first among equals), -1 where there is no other.
// `similarities` must be square.
std::vector<int64_t> nearest(const Matrix& similarities);

// Numbered sentences, then the matrix under the same numbers with two decimals.
std::string similarity_table(const std::vector<std::string>& sentences, const Matrix& similarities);

// One line a sentence: which is nearest, and how near.
std::string nearest_table(const std::vector<std::string>& sentences, const Matrix& similarities);

// One line a rank: bytes of weights there, and how much that is of `one_process` bytes.
std::string weight_table(const std::vector<int64_t>& bytes_of_rank, int64_t one_process);

// "largest difference from one process: 1.2e-07", without an end of line: it is the last thing printed.
std::string difference_line(float difference);

// Whether the job's numbers are one process's: at most 1e-5, and a number at all.
bool is_close_enough(float difference);

// `text` cut to `width` characters of UTF-8, the last an ellipsis when it was longer.
std::string shortened(const std::string& text, int64_t width);

// "1,234,567"
std::string with_commas(int64_t number);

}  // namespace embed
