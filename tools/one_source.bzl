"""Writes a source that includes others, so that they are compiled as one."""

def _one_source_impl(ctx):
    lines = []
    for file in ctx.files.srcs:
        root = file.owner.workspace_root + "/" if file.owner.workspace_root else ""
        lines.append('#include "{}"\n'.format(file.path[len(root):]))
    source = ctx.actions.declare_file(ctx.label.name + ".cpp")
    ctx.actions.write(source, "".join(lines))
    return [DefaultInfo(files = depset([source]))]

one_source = rule(
    implementation = _one_source_impl,
    attrs = {"srcs": attr.label_list(allow_files = [".cpp"])},
)
