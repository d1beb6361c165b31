"""Finds nvcc, which the library can do without.

It is $CUDA_HOME/bin/nvcc, else /usr/local/cuda/bin/nvcc, else the package that tools/setup --cuda installs.
"""

load("//third_party:environment.bzl", "ENVIRON", "cuda_environment_folder", "python_packages")

_BUILD = """package(default_visibility = ["//visibility:public"])

exports_files([
    "libcudart.so",
    "nvcc",
])

filegroup(
    name = "kernels",
    srcs = {kernels},
)

filegroup(
    name = "ptxas_report",
    srcs = {ptxas_report},
)
"""

_MISSING = """{} is missing, so the GPU's kernels are left out. To have them, run tools/setup and tools/setup --cuda and
then bazel shutdown, so that the next build looks again; or set CUDA_HOME to a CUDA 13 toolkit."""

def _packaged_nvcc(repository_ctx):
    """Returns the words that begin a command of the package's nvcc, and libcudart; None where either is missing.

    The package has neither CUDA's headers nor its libraries: the environment of tools/setup has them.
    """
    compiler = python_packages(repository_ctx, cuda_environment_folder(repository_ctx))
    libraries = python_packages(repository_ctx)
    if not compiler or not libraries:
        return None
    compiler = compiler.get_child("nvidia").get_child("cu13")
    libraries = libraries.get_child("nvidia").get_child("cu13")
    nvcc = compiler.get_child("bin").get_child("nvcc")
    cudart = libraries.get_child("lib").get_child("libcudart.so.13")
    if not nvcc.exists or not cudart.exists:
        return None
    include = libraries.get_child("include")
    return [str(nvcc), "-I{}".format(include), "-isystem", str(include.get_child("cccl"))], cudart

def _installed_cudart(repository_ctx, toolkit):
    """Returns the library that the kernels are linked with, of a toolkit's folder."""
    folders = ["lib64", "lib", "targets/x86_64-linux/lib", "lib/x86_64-linux-gnu"]
    for folder in folders:
        cudart = repository_ctx.path("{}/{}/libcudart.so".format(toolkit, folder))
        if cudart.exists:
            return cudart
    fail("{} has nvcc, and no libcudart.so in {}: install CUDA's runtime library there".format(
        toolkit,
        ", ".join(folders),
    ))

def _cuda_compiler_impl(repository_ctx):
    home = repository_ctx.os.environ.get("CUDA_HOME")
    installed = repository_ctx.path((home or "/usr/local/cuda") + "/bin/nvcc")
    if home and not installed.exists:
        fail("CUDA_HOME={} has no bin/nvcc: correct or unset it".format(home))
    if installed.exists:
        found = [str(installed)], _installed_cudart(repository_ctx, installed.dirname.dirname)
    else:
        found = _packaged_nvcc(repository_ctx)
    if found:
        command, cudart = found
        repository_ctx.symlink(cudart, "libcudart.so")

        # Its version in the script makes another compiler compile anew.
        version = repository_ctx.execute([command[0], "--version"]).stdout.strip().replace("\n", "\n# ")
        words = " ".join(["\"{}\"".format(word) for word in command])
        repository_ctx.file("nvcc", "#!/bin/sh\n# {}\nexec {} \"$@\"\n".format(version, words), executable = True)
    else:
        # buildifier: disable=print
        print(_MISSING.format(installed))
        repository_ctx.file("nvcc", "#!/bin/sh\necho \"there is no nvcc\" >&2\nexit 1\n", executable = True)
        repository_ctx.file("libcudart.so", "")
    repository_ctx.file("BUILD.bazel", _BUILD.format(
        kernels = repr(["@tessera//gpu_kernels:libtessera_gpu.so"] if found else []),
        ptxas_report = repr(["@tessera//gpu_kernels:ptxas_report.txt"] if found else []),
    ))

cuda_compiler = repository_rule(
    implementation = _cuda_compiler_impl,
    environ = ["CUDA_HOME"] + ENVIRON,
    doc = "Makes @tessera_cuda_compiler//:nvcc, :libcudart.so, :kernels and :ptxas_report.",
    local = True,
)
