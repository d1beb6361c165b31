"""Everything outside this repository that a build needs, found on this machine: nothing is downloaded."""

load("//third_party:cuda_compiler.bzl", "cuda_compiler")
load("//third_party:environment.bzl", "tessera_environment")
load("//third_party:libtorch.bzl", "libtorch_repository")
load("//third_party:mpi.bzl", "tessera_mpi")
load("//third_party:system.bzl", "system_library")
load("//third_party/bazel:environment.bzl", "bazel_environment")

def tessera_repositories():
    """Declares @libtorch, @tessera_environment, @tessera_mpi, @tessera_cuda_compiler, @fmt, @spdlog, @doctest, @rapidcheck, @cli11, @nlohmann_json, @libdeflate, @zlib, @openssl_crypto and what Debian's Bazel lacks.

    A workspace that uses Tessera calls this, then bazel_environment_repositories() of @tessera_bazel_environment.
    """
    bazel_environment(name = "tessera_bazel_environment")
    libtorch_repository(name = "libtorch")
    tessera_environment(name = "tessera_environment")
    tessera_mpi(name = "tessera_mpi")
    cuda_compiler(name = "tessera_cuda_compiler")

    system_library(name = "fmt", header = "fmt/core.h", linkopts = ["-lfmt"])
    system_library(
        name = "spdlog",
        header = "spdlog/spdlog.h",
        # The library's own fmt is replaced by Debian's, which it was built with.
        defines = ["SPDLOG_SHARED_LIB", "SPDLOG_COMPILED_LIB", "SPDLOG_FMT_EXTERNAL"],
        linkopts = ["-lspdlog", "-lpthread"],
        deps = ["@fmt"],
    )
    system_library(name = "doctest", header = "doctest/doctest.h")
    system_library(name = "rapidcheck", header = "rapidcheck.h", linkopts = ["-lrapidcheck"])
    system_library(name = "cli11", header = "CLI/CLI.hpp")
    system_library(name = "nlohmann_json", header = "nlohmann/json.hpp")
    system_library(name = "libdeflate", header = "libdeflate.h", linkopts = ["-ldeflate"])
    system_library(name = "zlib", header = "zlib.h", linkopts = ["-lz"])
    system_library(name = "openssl_crypto", header = "openssl/hmac.h", linkopts = ["-lcrypto"])
    system_library(name = "valgrind", header = "valgrind/callgrind.h")
