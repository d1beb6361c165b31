#pragma once

#include <string>

// Returns the code that a test case of a C++ source runs, to search in it.
namespace tessera::testing {

// Returns code without comments, blanks and preprocessor lines. Text in quotes differs from code of the same letters.
std::string bare(const std::string& code);

// Returns the bare code of the test case of this name and of every declaration that it names, directly or through
// others; "" where there is no such test case. Declarations are told apart by their names alone, so all that share one
// are included.
std::string code_of_case(const std::string& source, const std::string& test_case);

}  // namespace tessera::testing
