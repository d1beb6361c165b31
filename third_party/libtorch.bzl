"""Finds LibTorch: $LIBTORCH (an unpacked release, or a torch package's folder), else what tools/setup installed."""

load("//third_party:environment.bzl", "ENVIRON", "environment_folder", "python_packages")

_BUILD = """package(default_visibility = ["//visibility:public"])

config_setting(
    name = "cuda",
    define_values = {{"tessera_cuda": "true"}},
)

# Tests find LibTorch's folder by the file that this is a link to.
filegroup(
    name = "version",
    srcs = ["include/torch/headeronly/version.h"],
)

cc_library(
    name = "torch",
    hdrs = glob(["include/**/*.h", "include/**/*.hpp", "include/**/*.cuh", "include/**/*.inc"]),
    defines = ["USE_DISTRIBUTED", "USE_C10D_GLOO"],
    includes = ["include", "include/torch/csrc/api/include"],
    linkopts = ["-L{lib}", "-Wl,-rpath,{lib}", "-Wl,-rpath-link,{lib}"] + {rpath_links} + ["-Wl,--push-state,--no-as-needed"] + select({{
        ":cuda": ["-ltorch_cuda", "-lc10_cuda"],
        "//conditions:default": [],
    }}) + ["-ltorch_cpu", "-lc10"],
)

# The one library that is compiled for CUDA needs this: all others are the same with and without.
cc_library(
    name = "nccl",
    hdrs = select({{
        ":cuda": glob(["cuda_include/**/*"], allow_empty = True),
        "//conditions:default": [],
    }}),
    defines = select({{
        ":cuda": ["USE_C10D_NCCL"],
        "//conditions:default": [],
    }}),
    includes = select({{
        ":cuda": {cuda_includes},
        "//conditions:default": [],
    }}),
    deps = [":torch"],
)
"""

_HINT = "run tools/setup, or set LIBTORCH to an unpacked LibTorch 2.11 or to the folder of an installed torch package"

def _libtorch_folder(repository_ctx):
    chosen = repository_ctx.os.environ.get("LIBTORCH")
    if chosen:
        folder = repository_ctx.path(chosen)
    else:
        packages = python_packages(repository_ctx)
        if not packages:
            fail("LibTorch is not in {} and LIBTORCH is not set: {}".format(environment_folder(repository_ctx), _HINT))
        folder = packages.get_child("torch")
    if " " in str(folder):
        fail("LibTorch's folder '{}' has a blank, which Bazel's flags for the linker cannot have: move it, or make a link to it".format(folder))
    for part in ["include/torch/csrc/api/include/torch/torch.h", "lib/libtorch_cpu.so"]:
        if not repository_ctx.path(str(folder) + "/" + part).exists:
            fail("LibTorch's folder {} has no {}: {}".format(folder, part, _HINT))
    return folder

def _link_headers(repository_ctx, folder):
    """Links LibTorch's headers, but for its bundled fmt, which would hide the one that spdlog needs; and Gloo's shim."""
    for entry in folder.get_child("include").readdir():
        if entry.basename in ["ATen", "c10", "caffe2", "torch"]:
            repository_ctx.symlink(entry, "include/" + entry.basename)
    shim = repository_ctx.path(Label("//third_party/gloo:gloo/context.h")).dirname
    repository_ctx.symlink(shim, "include/gloo")

def _link_cuda_headers(repository_ctx, nvidia):
    """CUDA's and NCCL's headers that Python packages brought, if any; returns the include folders."""
    includes = []
    for package in ["cu13", "nccl"]:
        include = repository_ctx.path("{}/{}/include".format(nvidia, package))
        if include.exists:
            repository_ctx.symlink(include, "cuda_include/" + package)
            includes.append("cuda_include/" + package)
    return includes

def _libtorch_impl(repository_ctx):
    folder = _libtorch_folder(repository_ctx)
    nvidia = repository_ctx.path(str(folder.dirname) + "/nvidia")
    _link_headers(repository_ctx, folder)
    rpath_links = []
    if nvidia.exists:
        for package in nvidia.readdir():
            if package.get_child("lib").exists:
                rpath_links.append("-Wl,-rpath-link,{}/lib".format(package))
    repository_ctx.file("BUILD.bazel", _BUILD.format(
        lib = str(folder) + "/lib",
        cuda_includes = repr(_link_cuda_headers(repository_ctx, nvidia)),
        rpath_links = repr(rpath_links),
    ))

libtorch_repository = repository_rule(
    implementation = _libtorch_impl,
    environ = ENVIRON + ["LIBTORCH"],
    doc = "Makes @libtorch//:torch, which has headers and c10d with Gloo, and @libtorch//:nccl for --config=cuda.",
    local = True,
)
