"""The rules that every BUILD file here uses. Compiler flags live in this file alone.

They serve users of the library too: load("@tessera//tools:build_defs.bzl", "tessera_distributed_test").
"""

_WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Wnon-virtual-dtor",
    "-Woverloaded-virtual",
    "-Wvla",
    # Options are given as {.timeout = t}; the fields left out have defaults.
    "-Wno-missing-field-initializers",
    # GCC 12 reports these inside the standard library's own templates.
    "-Wno-restrict",
    "-Wno-array-bounds",
    "-Wno-stringop-overflow",
    "-Wno-maybe-uninitialized",
]

# Libraries are optimized a little in every mode, tests in none: their time is compilation.
_LIBRARY_COPTS = ["-std=c++20", "-g0"] + _WARNINGS
_TEST_COPTS = ["-std=c++20", "-g0", "-O0", "-include", "tessera/tests/harness/prelude.h"] + _WARNINGS

# In this repository a warning is an error; in a user's it is the user's to decide.
def _werror():
    ours = Label("//tools:build_defs.bzl").workspace_name
    return ["-Werror"] if native.repository_name() == "@" + ours else []

def _library_copts():
    return _LIBRARY_COPTS + _werror() + select({
        "@tessera//tools:optimized": ["-O2"],
        "//conditions:default": ["-O1"],
    })

def _include_prefix():
    package = native.package_name()
    return "tessera/" + package if package else "tessera"

def tessera_library(name, srcs = [], hdrs = [], deps = [], visibility = ["//visibility:public"], **kwargs):
    """A library whose header x.h in folder f is included as "tessera/f/x.h".

    Pass alwayslink = True where an object registers something (kernels, test cases) and nothing names it.
    """
    native.cc_library(
        name = name,
        srcs = srcs,
        hdrs = hdrs,
        deps = deps,
        copts = _library_copts() + kwargs.pop("copts", []),
        include_prefix = _include_prefix(),
        visibility = visibility,
        **kwargs
    )

def tessera_binary(name, srcs, deps = [], visibility = ["//visibility:public"], **kwargs):
    """A program, compiled as the libraries are."""
    native.cc_binary(
        name = name,
        srcs = srcs,
        deps = deps,
        copts = _library_copts() + kwargs.pop("copts", []),
        visibility = visibility,
        **kwargs
    )

def tessera_test(name, srcs, deps = [], size = "small", tags = [], **kwargs):
    """A doctest of one process; its main function is given. tools/test --full runs it under sanitizers too."""
    native.cc_test(
        name = name,
        srcs = srcs,
        deps = deps + ["@tessera//tests/harness:main", "@doctest"],
        copts = _TEST_COPTS + _werror() + kwargs.pop("copts", []),
        size = size,
        tags = tags + ["single"],
        **kwargs
    )

def tessera_distributed_test(name, srcs, deps = [], size = "medium", tags = [], **kwargs):
    """A doctest with cases that run in several processes: TESSERA_RANKS_TEST_CASE of tests/harness/ranks.h."""
    native.cc_test(
        name = name,
        srcs = srcs,
        deps = deps + [
            "@tessera//tests/harness:main",
            "@tessera//tests/harness:ranks",
            "@tessera//tests/harness:world",
            "@doctest",
        ],
        copts = _TEST_COPTS + _werror() + kwargs.pop("copts", []),
        size = size,
        # Its ranks share the machine: two such tests at once on two cores would run into their time limits.
        tags = tags + ["cpu:2"],
        **kwargs
    )
