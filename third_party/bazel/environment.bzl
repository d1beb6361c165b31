"""Makes what Bazel expects to download from what Debian packages with its bazel-bootstrap 4.2."""

_REPOSITORIES = """load("@bazel_tools//tools/build_defs/repo:utils.bzl", "maybe")

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

def _bazel_environment_impl(repository_ctx):
    repository_ctx.file("BUILD.bazel", "")
    repository_ctx.file("rules_cc/cc/BUILD", "")
    repository_ctx.template("rules_cc/cc/defs.bzl", Label("//third_party/bazel:rules_cc_defs.bzl"))
    repository_ctx.file("coverage/README", "Coverage is not collected.\n")
    here = str(repository_ctx.path("."))
    content = _REPOSITORIES.format(rules_cc = here + "/rules_cc", coverage = here + "/coverage")
    repository_ctx.file("repositories.bzl", content)

bazel_environment = repository_rule(
    implementation = _bazel_environment_impl,
    doc = "Makes @NAME//:repositories.bzl, whose bazel_environment_repositories() a WORKSPACE calls.",
    local = True,
)
