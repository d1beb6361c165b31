"""Finds MPI, which the library can do without: $MPI_HOME, else Debian's Open MPI, else what mpicc names."""

_BUILD = """package(default_visibility = ["//visibility:public"])

# bazel build --define=tessera_mpi=false builds as on a machine without MPI.
config_setting(
    name = "off",
    define_values = {{"tessera_mpi": "false"}},
)

filegroup(
    name = "headers",
    srcs = glob(["include/**/*.h"], allow_empty = True),
)
"""

# Not a cc_library: the flags of one reach all that depends on it, and a build with MPI would share nothing with one without.
_FLAGS = """# What a target adds to be compiled and linked with MPI, where there is one.

def with_mpi(flags, otherwise = []):
    return select({{"@tessera_mpi//:off": otherwise, "//conditions:default": flags if {found} else otherwise}})

MPI_HEADERS = ["@tessera_mpi//:headers"]
MPI_COPTS = ["-isystem", "external/tessera_mpi/include", "-DOMPI_SKIP_MPICXX", "-DMPICH_SKIP_MPICXX"]
MPI_LINKOPTS = {linkopts}
"""

def _candidates(repository_ctx):
    """Pairs of folders: of mpi.h, and of libmpi.so."""
    home = repository_ctx.os.environ.get("MPI_HOME")
    if home:
        if " " in home:
            fail("MPI_HOME='{}' has a blank, which Bazel's flags for the linker cannot have: make a link to it".format(home))
        libs = [lib for lib in [home + "/lib", home + "/lib64"] if repository_ctx.path(lib + "/libmpi.so").exists]
        if not libs:
            fail("MPI_HOME={} has no lib/libmpi.so and no lib64/libmpi.so: correct or unset it".format(home))
        return [(home + "/include", libs[0])]
    found = []
    for machine in ["x86_64", "aarch64"]:
        folder = "/usr/lib/{}-linux-gnu/openmpi".format(machine)
        found.append((folder + "/include", folder + "/lib"))
    mpicc = repository_ctx.which("mpicc")
    if mpicc:
        folders = []
        for what in ["incdirs", "libdirs"]:
            shown = repository_ctx.execute([mpicc, "--showme:" + what])
            folders.append(shown.stdout.strip().split(" ")[0] if shown.return_code == 0 else "")
        found.append((folders[0], folders[1]))
    return found

def _tessera_mpi_impl(repository_ctx):
    linkopts = None
    for include, lib in _candidates(repository_ctx):
        if linkopts == None and include and repository_ctx.path(include + "/mpi.h").exists:
            repository_ctx.symlink(include, "include")
            linkopts = ["-L" + lib, "-Wl,-rpath," + lib, "-lmpi"]
    if linkopts == None and repository_ctx.os.environ.get("MPI_HOME"):
        fail("MPI_HOME={} has no include/mpi.h: correct or unset it".format(repository_ctx.os.environ["MPI_HOME"]))
    repository_ctx.file("BUILD.bazel", _BUILD.format())
    repository_ctx.file("flags.bzl", _FLAGS.format(found = linkopts != None, linkopts = repr(linkopts or [])))

tessera_mpi = repository_rule(
    implementation = _tessera_mpi_impl,
    environ = ["MPI_HOME", "PATH"],
    doc = "Makes @tessera_mpi//:flags.bzl; called tessera_mpi.",
    local = True,
)
