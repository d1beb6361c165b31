"""Libraries that the system's package manager installed under /usr/include."""

_BUILD = """package(default_visibility = ["//visibility:public"])

cc_library(
    name = "{name}",
    defines = {defines},
    linkopts = {linkopts},
    deps = {deps},
)
"""

def _system_library_impl(repository_ctx):
    attr = repository_ctx.attr
    if not repository_ctx.path("/usr/include/" + attr.header).exists:
        fail("/usr/include/{} is missing: run tools/setup, which installs {} and the rest".format(attr.header, attr.name))
    repository_ctx.file("BUILD.bazel", _BUILD.format(
        name = attr.name,
        defines = repr(attr.defines),
        linkopts = repr(attr.linkopts),
        deps = repr(attr.libraries),
    ))

_system_library = repository_rule(
    implementation = _system_library_impl,
    attrs = {
        "header": attr.string(mandatory = True, doc = "One header of it, below /usr/include."),
        "defines": attr.string_list(),
        "linkopts": attr.string_list(),
        "libraries": attr.string_list(),
    },
    local = True,
)

def system_library(name, header, defines = [], linkopts = [], deps = []):
    """Makes @name//:name, a library whose headers the compiler finds by itself."""
    _system_library(name = name, header = header, defines = defines, linkopts = linkopts, libraries = deps)
