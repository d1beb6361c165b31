"""Writes the pages of the API reference, one per public header, as Markdown for Sphinx."""

import re
import tomllib
from pathlib import Path

from comments import split_title, to_markdown
from headers import read_header

HERE = Path(__file__).resolve().parent

NAMES_IN_HEADING = 4


def read_groups():
    """Returns the groups of public headers: title and headers."""
    with open(HERE / "reference.toml", "rb") as file:
        return [(group["title"], group["headers"]) for group in tomllib.load(file)["group"]]


def write_reference(root, out):
    """Writes one page per header and the pages that list them. Returns the headers."""
    groups = read_groups()
    entries = {header: read_header(root / header) for _, headers in groups for header in headers}
    names = {name for each in entries.values() for entry in each for name in _names(entry)}
    for header, of_header in entries.items():
        page = out / (header + ".md")
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(_Page(header, names).text(of_header))
    _write_indexes(out, groups, entries)
    return list(entries)


def _names(entry):
    return [name for declaration in entry.declarations for name in declaration.names]


def _write_indexes(out, groups, entries):
    """Writes a page per group, which lists its headers, and index.md, which lists all."""
    everything = [
        "# All headers\n",
        "These are the headers that programs include. Each has a page with its comments and declarations; what is in",
        "the namespace `tessera::detail` is left out, since only the library uses it.\n",
    ]
    for title, headers in groups:
        table = _table(headers, entries)
        everything += [f"## {title}\n"] + table
        # In the navigation a header is called by its last name, since the group's title stands above it.
        tree = ["```{toctree}", ":hidden:", ""] + [f"{header.rsplit('/', 1)[-1]} <{header}>" for header in headers]
        page = [f"# {title}\n"] + table + tree + ["```", ""]
        (out / group_page(title)).with_suffix(".md").write_text("\n".join(page))
    (out / "index.md").write_text("\n".join(everything))


def group_page(title):
    return title.lower().replace(" ", "-")


def _table(headers, entries):
    lines = ["| header | declares |", "| --- | --- |"]
    for header in headers:
        names = dict.fromkeys(name for entry in entries[header] for name in _names(entry))
        declared = ", ".join(f"{{declared}}`{header} {name}`" for name in names if re.fullmatch(r"\w+", name))
        lines.append(f"| [{header}]({header}.md) | {declared} |")
    return lines + [""]


class _Page:
    def __init__(self, header, names):
        self.header = header
        self.names = names
        self.taken = set()
        self.parts = []

    def text(self, entries):
        self.parts = [f"# {self.header}", f'```{{code-block}} cpp\n#include "tessera/{self.header}"\n```']
        for namespace in dict.fromkeys(entry.namespace for entry in entries if entry.namespace not in ("", "tessera")):
            self.parts.append(f"Names on this page are in the namespace `{namespace}`.")
        for entry in entries:
            self.add(entry, "##", "")
        return "\n\n".join(self.parts) + "\n"

    def add(self, entry, level, scope):
        title, comment = split_title(entry.comment)
        if title:
            self.parts.append(f"**{title}**")
        prose = to_markdown(comment, self.names)
        if not entry.declarations:
            self.parts.append(prose)
            return
        names = list(dict.fromkeys(_names(entry)))
        shown = names[:NAMES_IN_HEADING] + (["..."] if len(names) > NAMES_IN_HEADING else [])
        if not names:
            shown = ["operator=="]
        whole = is_shown_whole(entry)
        code = "\n".join(declaration.text for declaration in entry.declarations)
        if whole:
            code += _body(entry)
        elif entry.declarations[0].kind in ("class", "struct"):
            code += ";"
        declared = self.declared(entry, scope)
        if whole:
            inner = scope + names[0] + "::"
            declared += [line for member in entry.members for line in self.declared(member, inner)]
        self.parts.append(f"{level} " + ", ".join(f"`{name}`" for name in shown))
        self.parts.append(f"```{{code-block}} cpp\n:class: declaration\n\n{code}\n```")
        self.parts.append(f"```{{declares}} {self.header} {entry.line}\n" + "\n".join(declared) + "\n```")
        if entry.declarations[0].kind == "holder":
            prose = f"Holds a `{names[0]}Impl`, as LibTorch's modules are held.\n\n" + prose
        if entry.protected:
            prose = "Is for derived classes (protected).\n\n" + prose
        self.parts.append(prose)
        if not whole:
            for member in entry.members:
                self.add(member, level + "#", scope + names[0] + "::")

    def declared(self, entry, scope):
        """Returns a line "anchor kind name" for each name: what the directive `declares` reads."""
        lines = []
        for declaration in entry.declarations:
            for name in declaration.names:
                name = scope + name
                anchor = re.sub(r"[^\w.]+", "-", name.replace("::", "."))
                count = 1
                while (anchor if count == 1 else f"{anchor}-{count}") in self.taken:
                    count += 1
                anchor = anchor if count == 1 else f"{anchor}-{count}"
                self.taken.add(anchor)
                prefix = entry.namespace.removeprefix("tessera").removeprefix("::")
                kind = "class" if declaration.kind == "holder" else declaration.kind
                lines.append(f"{anchor} {kind} {prefix + '::' if prefix else ''}{name}")
        return lines


def is_shown_whole(entry):
    """Says whether a class is shown as one piece of code: its members have no comments of their own."""
    return bool(entry.members) and not any(member.comment or member.members for member in entry.members)


def _body(entry):
    groups = []
    for member in entry.members:
        lines = [line for declaration in member.declarations for line in declaration.text.split("\n")]
        groups.append("\n".join([" protected:"] * member.protected + ["  " + line for line in lines]))
    return " {\n" + "\n\n".join(groups) + "\n};"
