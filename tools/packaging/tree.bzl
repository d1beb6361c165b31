"""Collects what tools/install installs in one tar file."""

HeadersInfo = provider(
    doc = "Headers of this repository.",
    fields = {"own": "those of the target", "all": "those of the target and of what it needs"},
)

def _headers_impl(target, ctx):
    own = []
    if target.label.workspace_name == "" and "not_installed" not in ctx.rule.attr.tags:
        own = getattr(ctx.rule.files, "hdrs", [])
    below = [dep[HeadersInfo].all for dep in getattr(ctx.rule.attr, "deps", []) if HeadersInfo in dep]
    return [HeadersInfo(own = own, all = depset(own, transitive = below))]

_headers = aspect(implementation = _headers_impl, attr_aspects = ["deps"])

def _tree_impl(ctx):
    headers = []
    for dep in ctx.attr.headers_below:
        headers += dep[HeadersInfo].all.to_list()
    for dep in ctx.attr.headers_of:
        headers += dep[HeadersInfo].own
    places = ["{}\tinclude/tessera/{}".format(file.path, file.short_path) for file in headers]
    for target, place in ctx.attr.files.items():
        for file in target.files.to_list():
            places.append("{}\t{}{}".format(file.path, place, file.basename if place.endswith("/") else ""))
    manifest = ctx.actions.declare_file(ctx.label.name + ".manifest")
    ctx.actions.write(manifest, "\n".join(places) + "\n")
    out = ctx.actions.declare_file(ctx.label.name + ".tar")
    ctx.actions.run(
        executable = ctx.executable._make,
        arguments = [out.path, manifest.path, ctx.file.facts.path],
        inputs = headers + ctx.files.files + [manifest, ctx.file.facts],
        outputs = [out],
        mnemonic = "InstallTree",
    )
    return [DefaultInfo(files = depset([out]), runfiles = ctx.runfiles(files = [out]))]

install_tree = rule(
    implementation = _tree_impl,
    attrs = {
        "headers_below": attr.label_list(aspects = [_headers], doc = "Their headers, and those of what they need."),
        "headers_of": attr.label_list(aspects = [_headers], doc = "Their headers alone."),
        "files": attr.label_keyed_string_dict(allow_files = True, doc = "Where files go; a folder ends with a slash."),
        "facts": attr.label(allow_single_file = True, mandatory = True, doc = "Shell variables; see make_tree.sh."),
        "_make": attr.label(
            default = Label("//tools/packaging:make_tree.sh"),
            allow_single_file = True,
            executable = True,
            cfg = "host",
        ),
    },
    doc = "NAME.tar, with everything that is installed, as paths below the prefix.",
)
