"""What Debian's bazel-bootstrap 4.2.3 expects to be downloaded and Debian packages instead; nothing for other builds."""

_DEBIAN = """load("@bazel_tools//tools/build_defs/repo:utils.bzl", "maybe")

def bazel_environment_repositories():
    maybe(native.local_repository, name = "rules_java", path = "/usr/share/bazel/rules/java")
    maybe(native.local_repository, name = "rules_proto", path = "/usr/share/bazel/rules/proto")
    maybe(native.local_repository, name = "bazel_skylib", path = "/usr/share/bazel/tools/skylib")
    maybe(native.new_local_repository, name = "rules_cc", path = "{rules_cc}", build_file_content = "")
    maybe(native.new_local_repository, name = "remote_coverage_tools", path = "{coverage}", build_file_content = \"\"\"
package(default_visibility = ["//visibility:public"])
filegroup(name = "coverage_report_generator")
filegroup(name = "lcov_merger")
\"\"\")
"""

_OTHER = """def bazel_environment_repositories():
    pass
"""

def _bazel_environment_impl(repository_ctx):
    repository_ctx.file("BUILD.bazel", "")
    if repository_ctx.attr.version in ["", "no_version"]:
        here = repository_ctx.path(".")
        repository_ctx.file("rules_cc/cc/BUILD", "")
        repository_ctx.template("rules_cc/cc/defs.bzl", Label("//third_party/bazel:rules_cc_defs.bzl"))
        repository_ctx.file("coverage/README", "Coverage is not collected.\n")
        content = _DEBIAN.format(rules_cc = str(here) + "/rules_cc", coverage = str(here) + "/coverage")
    else:
        content = _OTHER
    repository_ctx.file("repositories.bzl", content)

_bazel_environment = repository_rule(
    implementation = _bazel_environment_impl,
    attrs = {"version": attr.string()},
    local = True,
)

def bazel_environment(name):
    """Makes @name//:repositories.bzl, whose bazel_environment_repositories() a WORKSPACE calls."""
    _bazel_environment(name = name, version = getattr(native, "bazel_version", ""))
