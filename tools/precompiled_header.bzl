"""Compiles a header once for all sources that begin with it."""

load("@bazel_tools//tools/build_defs/cc:action_names.bzl", "CPP_COMPILE_ACTION_NAME")
load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")

def _precompiled_header_impl(ctx):
    toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    of_deps = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps]).compilation_context

    # GCC and Clang look for NAME.gch beside the NAME that -include names. The two lie in a folder of their own.
    header = ctx.actions.declare_file("_precompiled/{}/{}".format(ctx.label.name, ctx.attr.include))
    compiled = ctx.actions.declare_file("_precompiled/{}/{}.gch".format(ctx.label.name, ctx.attr.include))
    ctx.actions.expand_template(output = header, template = ctx.file.header, substitutions = {})

    # With -MD GCC keeps the list of headers in what it compiles, and with -fpch-deps adds it to the list of each source
    # that begins with it. Bazel compiles a source again only if a file in its list has changed.
    headers_read = ctx.actions.declare_file("_precompiled/{}/{}.d".format(ctx.label.name, ctx.attr.include))
    folder = header.path[:-len(ctx.attr.include) - 1]

    # By default Clang keeps the headers' absolute paths and times, and refuses the precompiled header in another
    # checkout, to which a build cache brings it. These flags keep paths below the current folder, and no times. The
    # last one instantiates templates once, in the precompiled header.
    for_clang = [
        "-working-directory=/proc/self/cwd",
        "-isysroot",
        "/proc/self/cwd",
        "-relocatable-pch",
        "-Xclang",
        "-fno-pch-timestamp",
        "-fpch-instantiate-templates",
    ] if toolchain.compiler == "clang" else []

    # Both refuse a precompiled header whose flags for code differ from those of the source, so these are the flags
    # that Bazel gives to sources.
    variables = cc_common.create_compile_variables(
        feature_configuration = features,
        cc_toolchain = toolchain,
        user_compile_flags = ctx.fragments.cpp.copts + ctx.fragments.cpp.cxxopts + ctx.attr.copts +
                             ["-x", "c++-header", "-MD", "-MF", headers_read.path] + for_clang,
        use_pic = True,
        include_directories = of_deps.includes,
        quote_include_directories = of_deps.quote_includes,
        system_include_directories = of_deps.system_includes,
        preprocessor_defines = of_deps.defines,
        source_file = header.path,
        output_file = compiled.path,
    )
    ctx.actions.run(
        executable = cc_common.get_tool_for_action(
            feature_configuration = features,
            action_name = CPP_COMPILE_ACTION_NAME,
        ),
        arguments = cc_common.get_memory_inefficient_command_line(
            feature_configuration = features,
            action_name = CPP_COMPILE_ACTION_NAME,
            variables = variables,
        ),
        env = cc_common.get_environment_variables(
            feature_configuration = features,
            action_name = CPP_COMPILE_ACTION_NAME,
            variables = variables,
        ),
        inputs = depset([header], transitive = [of_deps.headers, toolchain.all_files]),
        outputs = [compiled, headers_read],
        mnemonic = "CppPrecompile",
        progress_message = "Precompiling {}".format(ctx.attr.include),
        # A sandbox would link LibTorch's 9,000 headers one by one.
        execution_requirements = {"no-sandbox": "1"},
    )
    of_header = cc_common.create_compilation_context(
        headers = depset([header, compiled]),
        system_includes = depset([folder]),
    )
    of_headers = CcInfo(compilation_context = of_header)
    return [cc_common.merge_cc_infos(cc_infos = [of_headers] + [dep[CcInfo] for dep in ctx.attr.deps])]

precompiled_header = rule(
    implementation = _precompiled_header_impl,
    attrs = {
        "copts": attr.string_list(doc = "The flags of the sources that use it: all that change code, -O and -g among them."),
        "deps": attr.label_list(providers = [CcInfo]),
        "header": attr.label(allow_single_file = [".h"], mandatory = True),
        "include": attr.string(mandatory = True, doc = "The name by which -include finds it."),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
    doc = "A source that depends on it and is compiled with copts and -include INCLUDE reads the compiled header, in a " +
          "quarter of the time that parsing LibTorch's headers takes. It is compiled again when a header in it changes.",
)
