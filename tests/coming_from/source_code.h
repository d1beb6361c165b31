#pragma once

#include <string>

// What a test case of a C++ source runs, as text to search in.
namespace tessera::testing {

// Code without comments, blanks and preprocessor's lines. What stands in quotes is told apart from code of the same
// letters.
std::string bare(const std::string& code);

// The bare code of the test case of this name and, of what the source declares outside of test cases, all that it
// names, and that names in turn; "" where there is no such test case. A declaration is known by its name alone, so what
// shares one is taken along.
std::string code_of_case(const std::string& source, const std::string& test_case);

}  // namespace tessera::testing
