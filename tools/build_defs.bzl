"""Defines the rules that every BUILD file here uses. All compiler flags are in this file.

Users of the library may use them too: load("@tessera//tools:build_defs.bzl", "tessera_distributed_test").
"""

load(":headers.bzl", "headers")
load(":one_source.bzl", "one_source")

_WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Wnon-virtual-dtor",
    "-Woverloaded-virtual",
    "-Wvla",
    # Options are given as {.timeout = t}; all other fields have defaults.
    "-Wno-missing-field-initializers",
] + select({
    "@tessera//tools:clang": [],
    # GCC 12 reports these inside the standard library's own templates.
    "//conditions:default": [
        "-Wno-restrict",
        "-Wno-array-bounds",
        "-Wno-stringop-overflow",
        "-Wno-maybe-uninitialized",
    ],
})

# Libraries are compiled with at least -O1 in every mode, tests without optimization, since most of their time is
# compilation.
LIBRARY_COPTS = ["-std=c++20", "-g0"] + _WARNINGS + select({
    "@tessera//tools:optimized": ["-O2"],
    "//conditions:default": ["-O1"],
})
TEST_COPTS = ["-std=c++20", "-g0", "-O0"] + _WARNINGS

# In this repository a warning is an error; in a user's repository the user decides.
def _werror():
    ours = Label("//tools:build_defs.bzl").workspace_name
    return ["-Werror"] if native.repository_name() == "@" + ours else []

# Returns the flags and the dependencies of sources that begin with the precompiled header `target` of `package`. It
# is compiled with -fPIC. Under `-c opt` without `--force_pic`, Bazel compiles each source with -fPIC and without, so
# such a build uses none.
def _begin_precompiled(package, target, include):
    root = Label("//tools:build_defs.bzl").workspace_root
    folder = "/".join(["$(BINDIR)"] + ([root] if root else []) + [package, "_precompiled", target])

    # Clang looks for the compiled header beside this path only, not along -isystem.
    flags = ["-include", folder + "/" + include, "-Winvalid-pch"]
    return select({
        "@tessera//tools:compiled_twice": [],
        "//conditions:default": flags,
    }) + select({
        # Clang looks in this folder for the headers that a precompiled one has read.
        "@tessera//tools:clang": ["-isysroot", "."],
        # Tells Bazel which headers a precompiled one has read: else a source would stay as it is when one changes.
        "//conditions:default": ["-fpch-deps"],
    }), select({
        "@tessera//tools:compiled_twice": [],
        "//conditions:default": ["@tessera//{}:{}".format(package, target)],
    })

def _library_begins(precompiled):
    if precompiled == None:
        return [], []
    return _begin_precompiled("tools/precompiled", precompiled, "precompiled_" + precompiled + ".h")

# Test sources begin with a header of tests/harness; precompiled headers have it too.
def _test_begins(precompiled):
    flags, deps = ["-include", "tessera/tests/harness/prelude.h"], ["@tessera//tests/harness:prelude"]
    if precompiled == None:
        return flags, deps
    target = "precompiled_" + precompiled
    more_flags, more_deps = _begin_precompiled("tests/harness", target, target + ".h")
    return more_flags + flags, deps + more_deps

# Returns the sources to compile, and those that they include. LibTorch's headers leave templates to be instantiated at
# the end of each source, to which GCC gives five seconds for those of its modules, as to a test of a thousand lines.
def _compiled_as_one(name, srcs, as_one):
    if not as_one:
        return srcs, []
    one_source(name = name + "_as_one", testonly = True, srcs = srcs)
    return [":" + name + "_as_one"], srcs

# Returns the dependency by which the headers of library NAME are included as "tessera/f/x.h".
def _own_headers(name, hdrs, visibility, testonly = False):
    if not hdrs:
        return []
    headers(name = name + "_headers", srcs = hdrs, testonly = testonly, visibility = visibility)
    return [":" + name + "_headers"]

def tessera_library(
        name,
        srcs = [],
        hdrs = [],
        deps = [],
        precompiled = None,
        visibility = ["//visibility:public"],
        **kwargs):
    """A library whose header x.h in folder f is included as "tessera/f/x.h".

    Pass alwayslink = True where an object registers something (kernels, test cases) and no other object refers to it.

    precompiled: headers that are compiled once for all libraries, and are read in a fraction of the time that parsing
    takes: "core" for sources that include <ATen/core/Tensor.h> or fmt, "internals" for those that include LibTorch's
    dispatcher, autograd or process groups.
    """
    begin, more_deps = _library_begins(precompiled)
    native.cc_library(
        name = name,
        srcs = srcs,
        hdrs = hdrs,
        deps = _own_headers(name, hdrs, visibility) + deps + more_deps,
        copts = LIBRARY_COPTS + _werror() + begin + kwargs.pop("copts", []),
        visibility = visibility,
        **kwargs
    )

def tessera_binary(name, srcs, deps = [], visibility = ["//visibility:public"], **kwargs):
    """A program, compiled with the libraries' flags."""
    native.cc_binary(
        name = name,
        srcs = srcs,
        deps = deps,
        copts = LIBRARY_COPTS + _werror() + kwargs.pop("copts", []),
        visibility = visibility,
        **kwargs
    )

def tessera_test_library(name, srcs = [], hdrs = [], deps = [], precompiled = None, as_one = False, **kwargs):
    """A library that only tests use, compiled as they are. See tessera_test for `precompiled` and `as_one`."""
    begin, more_deps = _test_begins(precompiled)
    srcs, included = _compiled_as_one(name, srcs, as_one)
    visibility = kwargs.pop("visibility", ["//visibility:public"])
    native.cc_library(
        name = name,
        testonly = True,
        srcs = srcs,
        hdrs = hdrs,
        textual_hdrs = included,
        deps = _own_headers(name, hdrs, visibility, testonly = True) + deps + more_deps,
        copts = TEST_COPTS + _werror() + begin + kwargs.pop("copts", []),
        visibility = visibility,
        **kwargs
    )

def tessera_test_binary(name, srcs = [], deps = [], precompiled = None, **kwargs):
    """A program that only tests use, compiled as they are. See tessera_test for `precompiled`."""
    begin, more_deps = _test_begins(precompiled)
    native.cc_binary(
        name = name,
        testonly = True,
        srcs = srcs,
        deps = deps + more_deps,
        copts = TEST_COPTS + _werror() + begin + kwargs.pop("copts", []),
        visibility = kwargs.pop("visibility", ["//visibility:public"]),
        **kwargs
    )

_BACKEND_ENV = {
    "gloo": {},
    "mpi": {"TESSERA_BACKEND": "mpi"},
    "threads": {"TESSERA_TEST_RANKS": "threads"},
}

def _tests(name, srcs, deps, size, copts, backends, env, tags, precompiled, as_one, **kwargs):
    """Makes one test per backend: NAME for the first, NAME_mpi for mpi after it. The cases are compiled once.

    What comes after threads is for tools/test --full, which starts each rank as a program: it may take 15 minutes.
    Each process has one thread for an operator, unless `env` says otherwise: threads of tests that run at once on the
    same cores wait for each other in loops, for minutes.
    """
    env = dict({"OMP_NUM_THREADS": "1"}, **env)
    for backend in backends:
        if backend not in _BACKEND_ENV:
            fail("{}: there is no backend {}; the backends are {}".format(name, backend, ", ".join(_BACKEND_ENV)))
    begin, more_deps = _test_begins(precompiled)
    copts = TEST_COPTS + _werror() + begin + copts
    deps = deps + more_deps
    srcs, included = _compiled_as_one(name, srcs, as_one)
    if len(backends) > 1 or included:
        native.cc_library(
            name = name + "_cases",
            testonly = True,
            srcs = srcs,
            textual_hdrs = included,
            deps = deps,
            copts = copts,
            alwayslink = True,
            visibility = ["@tessera//tests/gpu:__pkg__"],
        )
        srcs, deps = [], [":" + name + "_cases"]
    for backend in backends:
        is_long = backends[0] == "threads" and backend != "threads"
        native.cc_test(
            name = name if backend == backends[0] else name + "_" + backend,
            srcs = srcs,
            deps = deps,
            size = "large" if is_long else size,
            copts = copts,
            env = dict(env, **_BACKEND_ENV[backend]),
            tags = tags + (["long"] if is_long else []),
            **kwargs
        )

def tessera_test(
        name,
        srcs,
        deps = [],
        size = "small",
        tags = [],
        backends = ["gloo"],
        env = {},
        precompiled = None,
        as_one = False,
        **kwargs):
    """A doctest of one process, with a main function. tools/test --full runs it under sanitizers too.

    Other `backends` than "gloo", such as "mpi", are for a test that starts ranks itself: TESSERA_BACKEND names them.

    precompiled: headers that are compiled once for all tests, and are read in a quarter of the time: "tensors" for
    sources that include <ATen/ATen.h>, "modules" for those that include <torch/nn.h>, <torch/optim.h> or more.
    as_one: compiles the sources as one, in a fraction of the time. Names in their unnamed namespaces must differ then.
    """
    _tests(
        name = name,
        srcs = srcs,
        deps = deps + ["@tessera//tests/harness:main", "@doctest"],
        copts = kwargs.pop("copts", []),
        backends = backends,
        env = env,
        precompiled = precompiled,
        as_one = as_one,
        size = size,
        tags = tags + ["single"],
        **kwargs
    )

def tessera_distributed_test(
        name,
        srcs,
        deps = [],
        size = "medium",
        tags = [],
        backends = ["gloo"],
        env = {},
        precompiled = None,
        as_one = False,
        **kwargs):
    """A doctest with cases that run in several processes: TESSERA_RANKS_TEST_CASE of tests/harness/ranks.h.

    backends: the backends for CPU tensors. ["gloo", "mpi"] makes two tests, NAME and NAME_mpi. Without MPI on the
    machine each case of the second counts as skipped. With "threads" ranks are threads of one process, in a third of
    the time: ["threads", "gloo"] makes NAME, and NAME_gloo, which is long.
    precompiled, as_one: see tessera_test.
    """
    _tests(
        name = name,
        srcs = srcs,
        deps = deps + [
            "@tessera//tests/harness:main",
            "@tessera//tests/harness:ranks",
            "@tessera//tests/harness:world",
            "@doctest",
        ],
        copts = kwargs.pop("copts", []),
        backends = backends,
        env = env,
        precompiled = precompiled,
        as_one = as_one,
        size = size,
        # The ranks share the machine: two such tests at once on two cores would exceed their time limits.
        tags = tags + ["cpu:2"],
        **kwargs
    )
