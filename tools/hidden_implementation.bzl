"""A library whose users get the headers of one target and the code of another."""

def _hidden_implementation_impl(ctx):
    interface, implementation = ctx.attr.interface[CcInfo], ctx.attr.implementation[CcInfo]
    return [
        CcInfo(
            compilation_context = interface.compilation_context,
            linking_context = implementation.linking_context,
        ),
        ctx.attr.implementation[DefaultInfo],
    ]

hidden_implementation = rule(
    implementation = _hidden_implementation_impl,
    attrs = {
        "implementation": attr.label(
            providers = [CcInfo],
            mandatory = True,
            doc = "It depends on the interface. Users are linked with it, and get none of its headers and definitions.",
        ),
        "interface": attr.label(providers = [CcInfo], mandatory = True, doc = "The headers that users include."),
    },
)
