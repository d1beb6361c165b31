"""Checks that tools/site/reference.toml knows every header that users reach: public_headers.py ROOT.

These are the headers of the targets that //:tessera names (a target without sources stands for its own dependencies
too), those that pages name, those that pages, examples and users' projects include, and what these include in turn.
Each must be in a group or be listed as internal, and nothing else may be listed.
"""

import ast
import re
import sys
import tomllib
from pathlib import Path

FOLDERS = "mesh|placement|ops|dtensor|styles|layers|tests/harness|tests/custom_placement"
INCLUDE = re.compile(rf'#include "tessera/((?:{FOLDERS})/[^"]+|[a-z_]+\.h)"')
MENTION = re.compile(rf"`tessera/((?:{FOLDERS})/[^`]+\.h|[a-z_]+\.h)`")
USERS = {"docs": (".md",), "tests/docs": (".cpp", ".h"), "tests/consumers": (".cpp", ".h"), "examples": (".cpp", ".h")}


def targets_of(folder):
    """Returns srcs, hdrs and deps of each tessera_library of a BUILD file."""
    targets = {}
    for node in ast.parse((folder / "BUILD.bazel").read_text()).body:
        call = getattr(node, "value", None)
        if isinstance(call, ast.Call) and call.func.id == "tessera_library":
            lists = {
                keyword.arg: [each.value for each in ast.walk(keyword.value) if isinstance(each, ast.Constant)]
                for keyword in call.keywords
            }
            targets[lists["name"][0]] = [lists.get(key, []) for key in ("srcs", "hdrs", "deps")]
    return targets


def headers_of(root, package, name):
    """Yields the headers of a target, and those of its dependencies if it has no sources."""
    targets = targets_of(root / package)
    if name not in targets:
        sys.exit(f"{Path(package, 'BUILD.bazel')} has no call tessera_library(name = \"{name}\", ...) at its top level")
    srcs, hdrs, deps = targets[name]
    yield from (str(Path(package, header)) for header in hdrs)
    if not srcs:
        for label in deps:
            if label.startswith("@"):
                continue
            folder, _, target = label.removeprefix("//").partition(":")
            folder = package if label.startswith(":") else folder
            yield from headers_of(root, folder, target or folder.rsplit("/", 1)[-1])


def included_by_users(root):
    for folder, endings in USERS.items():
        for path in (root / folder).rglob("*"):
            if path.suffix in endings:
                yield from INCLUDE.findall(path.read_text())
                yield from MENTION.findall(path.read_text())


def main(root):
    root = Path(root)
    reached, waiting = set(), [*headers_of(root, "", "tessera"), *included_by_users(root)]
    while waiting:
        header = waiting.pop()
        if header not in reached:
            reached.add(header)
            waiting += INCLUDE.findall((root / header).read_text())
    with open(root / "tools/site/reference.toml", "rb") as file:
        reference = tomllib.load(file)
    listed = [header for group in reference["group"] for header in group["headers"]] + reference["internal"]["headers"]
    problems = [f"{header} is not in tools/site/reference.toml" for header in sorted(reached - set(listed))]
    problems += [f"{header} is listed, and users do not reach it" for header in sorted(set(listed) - reached)]
    problems += [f"{header} is listed twice" for header in sorted(set(listed)) if listed.count(header) > 1]
    print("\n".join(problems))
    print(f"{len(reached)} headers, {len(problems)} problems")
    return 1 if problems or len(reached) < 50 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
