"""Makes the headers of a library includable as "tessera/folder/header.h"."""

# The folder with the links to a package's headers, below its outputs. A package has one, since Bazel leaves the links
# of a target that has gone or has lost a header: were they in a folder of its own, a header that has moved to another
# target of its package would still be found there, and its includes would be refused until `bazel clean`.
_FOLDER = "_include"

def _path_in_repository(file):
    path = file.short_path
    return path.split("/", 2)[2] if path.startswith("../") else path

def _headers_impl(ctx):
    links = []
    for file in ctx.files.srcs:
        path = _path_in_repository(file)
        if ctx.label.package and not path.startswith(ctx.label.package + "/"):
            fail("{}: {} is not below the folder of this target".format(ctx.label, file.short_path))
        link = ctx.actions.declare_file(_FOLDER + "/tessera/" + path)
        ctx.actions.symlink(output = link, target_file = file)
        links.append(link)
    folder = "/".join([ctx.bin_dir.path] + [
        part
        for part in [ctx.label.workspace_root, ctx.label.package, _FOLDER]
        if part
    ])
    context = cc_common.create_compilation_context(headers = depset(links), includes = depset([folder]))
    return [DefaultInfo(files = depset(links)), CcInfo(compilation_context = context)]

headers = rule(
    implementation = _headers_impl,
    attrs = {"srcs": attr.label_list(allow_files = True, mandatory = True)},
    doc = "A dependency by which sources include the header x.h of folder f as \"tessera/f/x.h\".",
)
