#pragma once

// Put before every test file by the macros of tools/build_defs.bzl. LibTorch's logging header defines CHECK too, and
// whichever comes last is used: with its own here, doctest's is the one that tests mean.
#if __has_include(<c10/util/Logging.h>)
#include <c10/util/Logging.h>
#endif
