"""Compares the API reference with what Doxygen finds in the headers: symbols.py SITE ROOT.

Doxygen reads the headers with a parser of its own. Every public class, enum, alias, function and macro that it finds
must be an object of the site's index, and the link beside it must lead to the line that declares it.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
import zlib
from pathlib import Path
from xml.etree import ElementTree

NAMESPACES = ("tessera", "tessera::rules", "tessera::testing")
SETTINGS = """
GENERATE_HTML = NO
GENERATE_LATEX = NO
GENERATE_XML = YES
XML_PROGRAMLISTING = NO
EXTRACT_ALL = YES
QUIET = YES
WARNINGS = NO
MACRO_EXPANSION = YES
EXPAND_ONLY_PREDEF = YES
PREDEFINED = "FORWARD_HAS_DEFAULT_ARGS(...)="
"""


def public_headers(root):
    with open(root / "tools/site/reference.toml", "rb") as file:
        return [header for group in tomllib.load(file)["group"] for header in group["headers"]]


def doxygen(root, headers):
    """Returns the root elements of Doxygen's compounds."""
    with tempfile.TemporaryDirectory() as out:
        files = " ".join(str(root / header) for header in headers)
        settings = SETTINGS + f"INPUT = {files}\nOUTPUT_DIRECTORY = {out}\nSTRIP_FROM_PATH = {root}\n"
        subprocess.run(["doxygen", "-"], input=settings, text=True, check=True)
        return [ElementTree.parse(path).getroot()[0] for path in Path(out, "xml").glob("*.xml") if path.stem != "index"]


def spelled(name):
    """Returns a name without blanks and without the namespaces that the reference leaves out."""
    return re.sub(r"\s", "", name).removeprefix("tessera::")


def found_by_doxygen(root, headers):
    """Yields the names that users see."""
    hidden = re.compile(r"(^|::)(detail|dispatch|brute)(::|$)|@")
    for compound in doxygen(root, headers):
        name = compound.findtext("compoundname")
        kind = compound.get("kind")
        if kind in ("class", "struct"):
            if compound.get("prot") == "private" or not name.startswith("tessera::") or hidden.search(name):
                continue
            yield spelled(name)
        elif kind == "namespace" and name not in NAMESPACES:
            continue
        for member in compound.iter("memberdef"):
            if member.get("prot") == "private" or member.get("kind") not in ("function", "enum", "typedef", "define"):
                continue
            own = member.findtext("name")
            if member.get("kind") == "define":
                if not own.endswith("_"):
                    yield own
            elif own == "TORCH_MODULE":  # LibTorch's macro, which declares a class
                yield member.findtext("argsstring").strip("()")
            elif kind != "file":
                yield spelled(f"{name}::{own}")


def site_objects(site):
    """Returns page and anchor of each name in the site's index."""
    data = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    objects = {}
    for line in zlib.decompress(data).decode().splitlines():
        name, place = re.fullmatch(r"(.+?) tessera:\w+ 1 (\S+) .*|.*", line).groups()
        if name:
            page, anchor = place.replace("$", name).split("#")
            objects.setdefault(spelled(name), []).append((page, anchor))
    return objects


def declaration_at(lines):
    """Returns the lines up to an empty one, or the whole class that begins here."""
    indent = re.match(" *", lines[0])[0]
    ends = ("",) if not re.search(r"^ *(class|struct) .*\{$", "\n".join(lines[:2]), re.MULTILINE) else (indent + "};",)
    end = next((i for i, text in enumerate(lines) if text in ends), len(lines))
    return "\n".join(lines[:end])


def wrong_lines(site, root, objects):
    """Yields each object whose section has no link to a line that declares it."""
    for name, places in objects.items():
        for page, anchor in places:
            section = (site / page).read_text().split(f'id="{anchor}"', 1)[-1]
            header, line = re.search(r'source/(\S+?)\.html#L-(\d+)"', section).groups()
            declaration = declaration_at((root / header).read_text().split("\n")[int(line) - 1 :])
            last = name.rsplit("::", 1)[-1]
            if last.startswith("operator") or re.search(rf"(?<!\w){re.escape(last)}(?!\w)", declaration):
                continue
            yield f"{name}: {header}, line {line} does not declare it"


def main(site, root):
    site, root = Path(site), Path(root)
    objects = site_objects(site)
    expected = set(found_by_doxygen(root, public_headers(root)))
    problems = [f"{name}: the reference lacks it" for name in sorted(expected - set(objects))]
    problems += wrong_lines(site, root, objects)
    print("\n".join(problems))
    print(f"{len(expected)} names by Doxygen, {len(objects)} in the site, {len(problems)} problems")
    return 1 if problems or len(expected) < 300 else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
