#pragma once

#include <exception>
#include <string>

#include <c10/util/Exception.h>

namespace tessera {

// Returns the error's text without the backtrace that LibTorch appends to its own errors.
inline std::string error_text(const std::exception& error) {
  const auto* const torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
}

// Returns the text of the exception that is being handled: only for use in a catch block.
inline std::string current_error_text() {
  try {
    throw;
  } catch (const std::exception& error) {
    return error_text(error);
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

}  // namespace tessera
