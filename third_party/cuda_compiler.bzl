"""Finds nvcc, which the library can do without: $CUDA_HOME/bin/nvcc, else /usr/local/cuda/bin/nvcc."""

_BUILD = """package(default_visibility = ["//visibility:public"])

exports_files(["nvcc"])

filegroup(
    name = "kernels",
    srcs = {kernels},
)

filegroup(
    name = "ptxas_report",
    srcs = {ptxas_report},
)
"""

def _cuda_compiler_impl(repository_ctx):
    home = repository_ctx.os.environ.get("CUDA_HOME")
    nvcc = repository_ctx.path((home or "/usr/local/cuda") + "/bin/nvcc")
    if nvcc.exists:
        # Its version in the script makes another compiler compile anew.
        version = repository_ctx.execute([nvcc, "--version"]).stdout.strip().replace("\n", "\n# ")
        repository_ctx.file("nvcc", "#!/bin/sh\n# {}\nexec \"{}\" \"$@\"\n".format(version, nvcc), executable = True)
    else:
        # buildifier: disable=print
        print("{} is missing, so the GPU's kernels are left out: set CUDA_HOME to a CUDA 13 toolkit".format(nvcc))
        repository_ctx.file("nvcc", "#!/bin/sh\necho \"there is no {}\" >&2\nexit 1\n".format(nvcc), executable = True)
    repository_ctx.file("BUILD.bazel", _BUILD.format(
        kernels = repr(["@tessera//gpu_kernels:libtessera_gpu.so"] if nvcc.exists else []),
        ptxas_report = repr(["@tessera//gpu_kernels:ptxas_report.txt"] if nvcc.exists else []),
    ))

cuda_compiler = repository_rule(
    implementation = _cuda_compiler_impl,
    environ = ["CUDA_HOME"],
    doc = "Makes @tessera_cuda_compiler//:nvcc, :kernels and :ptxas_report.",
    local = True,
)
