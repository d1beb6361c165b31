#pragma once

// The macros of tools/build_defs.bzl include this file before every test file. LibTorch's logging header defines CHECK
// too, and the last definition is used. It is included here first, so that tests use doctest's CHECK.
#if __has_include(<c10/util/Logging.h>)
#include <c10/util/Logging.h>
#endif
