#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace embed {

// These functions make the texts that the program prints. They are apart from the computation, so that tests need none.
// Every line ends with '\n'.

using Matrix = std::vector<std::vector<float>>;

// Returns, for each row, the other row with the largest similarity (the first among equals), or -1 if there is no
// other. `similarities` must be square.
std::vector<int64_t> nearest(const Matrix& similarities);

// Returns the numbered sentences, then the matrix with the same numbers, to two decimals.
std::string similarity_table(const std::vector<std::string>& sentences, const Matrix& similarities);

// Returns one line per sentence: the nearest other sentence and the similarity.
std::string nearest_table(const std::vector<std::string>& sentences, const Matrix& similarities);

// Returns one line per rank: its bytes of weights, and their share of `one_process` bytes.
std::string weight_table(const std::vector<int64_t>& bytes_of_rank, int64_t one_process);

// Returns "largest difference from one process: 1.2e-07", without an end of line.
std::string difference_line(float difference);

// Returns whether the job's numbers agree with one process's: `difference` is at most 1e-5, and not NaN.
bool is_close_enough(float difference);

// Returns `text` cut to `width` UTF-8 characters. The last of them is an ellipsis if the text was longer.
std::string shortened(const std::string& text, int64_t width);

// Returns text such as "1,234,567".
std::string with_commas(int64_t number);

}  // namespace embed
