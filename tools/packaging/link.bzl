"""Links the binaries of an installation: Tessera's own objects in one file, other libraries' symbols hidden."""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")

LinkedInfo = provider(
    doc = "A linked binary of the installation.",
    fields = {"archives": "the archives of ours whose objects it has, by their paths"},
)

# These are linked in: targets of this package compile them.
_LINKED_IN = ["fmt", "spdlog"]

# Nothing may be missing. gold, which Bazel takes where it is there, exports functions of the standard library in spite
# of a version script.
_LINKOPTS = ["-Wl,-z,defs", "-fuse-ld=bfd"]

def _keeps(flag):
    """Says whether a library outside this repository gives its flag to an installed binary, too.

    Folders of this machine are left out: a user's program finds LibTorch and MPI by its own RPATH, or by the loader's.
    """
    return not flag.startswith("-Wl,-rpath,")

def _archive(library):
    return library.pic_static_library or library.static_library

def _collect(deps, left_out = []):
    """The archives of ours in `deps`, without those that are left out, and the flags of libraries that are not ours."""
    archives = {}
    flags = []
    for dep in deps:
        for linker_input in dep[CcInfo].linking_context.linker_inputs.to_list():
            if linker_input.owner.workspace_name in _LINKED_IN:
                continue
            flags += [flag for flag in linker_input.user_link_flags if _keeps(flag)]
            for library in linker_input.libraries:
                archive = _archive(library)
                if archive.path not in left_out:
                    archives[archive.path] = archive
    return archives.values(), flags

def _own_flags(ctx):
    """The flags of the rule's attributes, and the files that they name."""
    inputs = [] + ctx.files.uses
    flags = [file.path for file in ctx.files.uses] + ctx.attr.linkopts + _LINKOPTS
    for file, option in [(ctx.file.version_script, "-Wl,--version-script={}"), (ctx.file.flags_file, "@{}")]:
        if file:
            inputs.append(file)
            flags.append(option.format(file.path))
    return flags, inputs

def _linked_impl(ctx):
    toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    used = ctx.attr.uses[LinkedInfo].archives if ctx.attr.uses else []
    archives, flags = _collect(ctx.attr.deps, used)
    hidden, _ = _collect(ctx.attr.linked_in)
    own_flags, inputs = _own_flags(ctx)
    name = ctx.label.name[len("lib"):] if ctx.label.name.startswith("lib") else ctx.label.name
    whole = [
        cc_common.create_library_to_link(
            actions = ctx.actions,
            feature_configuration = features,
            cc_toolchain = toolchain,
            pic_static_library = archive,
            alwayslink = True,
        )
        for archive in archives + hidden
    ]
    linked = cc_common.link(
        actions = ctx.actions,
        feature_configuration = features,
        cc_toolchain = toolchain,
        name = name,
        output_type = "executable" if ctx.attr.program else "dynamic_library",
        linking_contexts = [cc_common.create_linking_context(linker_inputs = depset([
            cc_common.create_linker_input(owner = ctx.label, libraries = depset(whole)),
        ]))],
        user_link_flags = own_flags + flags,
        additional_inputs = inputs,
    )
    if ctx.attr.program:
        file = linked.executable
    else:
        file = linked.library_to_link.resolved_symlink_dynamic_library or linked.library_to_link.dynamic_library
    return [DefaultInfo(files = depset([file])), LinkedInfo(archives = [archive.path for archive in archives])]

installed_binary = rule(
    implementation = _linked_impl,
    attrs = {
        "deps": attr.label_list(providers = [CcInfo], doc = "All objects of these and of what they need are linked."),
        "linked_in": attr.label_list(providers = [CcInfo], doc = "Other libraries' objects, whose names are hidden."),
        "uses": attr.label(providers = [LinkedInfo], doc = "A library that is linked, whose objects are left out."),
        "version_script": attr.label(allow_single_file = True, doc = "Names the symbols that the library exports."),
        "flags_file": attr.label(allow_single_file = True, doc = "A file with more of the linker's arguments."),
        "linkopts": attr.string_list(),
        "program": attr.bool(doc = "Makes a program, not a shared library."),
        "_cc_toolchain": attr.label(default = Label("@bazel_tools//tools/cpp:current_cc_toolchain")),
    },
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
    fragments = ["cpp"],
    doc = "A shared library or a program that names no folder of the machine on which it was linked.",
)
