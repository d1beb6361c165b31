"""Turns a header's comment into Markdown: paragraphs, lists and examples as its author laid them out.

Comments are plain text. A line that starts with two blanks is part of an example, unless it is an item of a list ("  - ")
or continues one. A line that ends although the next word would have fitted ends a paragraph.
"""

import re

from pygments.lexers import CppLexer
from pygments.token import Error

WIDTH = 120

_SEPARATOR = re.compile(r"-{2,} (.+?):? ?-*$")
_CODE = re.compile(
    r"`[^`]+`"  # marked by the author
    r"|(?<![\w:/.])(?:\w+::)+~?\w+(?:\(\))?"  # qualified names
    r"|(?<![\w:/.])\w+(?:/\w+)*\.(?:h|cpp)\b"  # files
    r"|(?<![\w:/.])[a-z]\w*_(?:\w*\w)?(?:\(\))?"  # snake_case and orthogonal_
    r"|(?<![\w:/.])[A-Za-z]\w+\(\)"  # calls without arguments
    r"|(?<![\w:/.])[A-Z][A-Z_]+_[A-Z_]+\b"  # macros and variables of the environment
    r"|(?<![\w:/.])(?P<camel>(?:[A-Z][a-z0-9]*){2,})\b"  # CamelCase, where it is a name of ours
    r"|(?<![\w:/.])k[A-Z]\w+\b"
)


def to_markdown(comment, names=()):
    """Returns the Markdown of a comment, given as (column, text behind "//") per line. `names` are the library's."""
    blocks = []
    for block in _blocks(comment):
        kind, lines = block
        if kind == "title":
            blocks.append(f"**{_prose(lines[0], names)}**")
        elif kind == "example":
            code = "\n".join(lines)
            blocks.append(f"```{'cpp' if _is_cpp(code) else 'text'}\n{code}\n```")
        elif kind == "item":
            blocks.append("- " + _prose(" ".join(lines), names))
        else:
            blocks.append(_prose(" ".join(lines), names))
    text = "\n\n".join(blocks)
    return re.sub(r"(?m)^(- .*)\n\n(?=- )", r"\1\n", text)


def _blocks(comment):
    """Yields "text", "item", "example" or "title", and the lines of each such part."""
    kind, lines = None, []
    for index, (column, raw) in enumerate(comment):
        text = raw[1:] if raw.startswith(" ") else raw
        found = _kind(text, kind)
        separator = _SEPARATOR.fullmatch(text.strip())
        if separator:
            found = "title"
            text = separator[1]
        goes_on = found == kind or (found == "continued" and kind == "item")
        if goes_on and found in ("text", "continued"):
            goes_on = not _ends_paragraph(comment[index - 1], text)
        if not goes_on or text.lstrip().startswith("- "):
            if lines:
                yield kind, _dedented(lines, kind)
            kind, lines = ("text" if found == "continued" and kind != "item" else found), []
            if found == "continued":
                kind = "text"
        if found is None:
            kind, lines = None, []
        elif text.strip():
            lines.append(text)
    if lines:
        yield kind, _dedented(lines, kind)


def _kind(text, before):
    if not text.strip():
        return None
    if text.lstrip().startswith("- "):
        return "item"
    if before == "item" and text.startswith("    "):
        return "continued"
    return "example" if text.startswith("  ") else "text"


def _ends_paragraph(line, following):
    column, text = line
    return column + 2 + len(text) + 1 + len(following.split()[0]) <= WIDTH


def _is_cpp(code):
    ends = any(line.rstrip().endswith((";", "{")) for line in code.split("\n"))
    return ends and all(token is not Error for token, _ in CppLexer().get_tokens(code))


def _dedented(lines, kind):
    if kind != "example":
        return [line.strip().removeprefix("- ") for line in lines]
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    return [line[indent:].rstrip() for line in lines]


def _prose(text, names):
    """Escapes what Markdown would read as markup, and marks names as code."""
    out, end = [], 0
    for match in _CODE.finditer(text):
        if match["camel"] and match["camel"] not in names:
            continue
        out.append(_escaped(text[end : match.start()]))
        out.append("`" + match[0].strip("`") + "`")
        end = match.end()
    out.append(_escaped(text[end:]))
    return "".join(out)


def _escaped(text):
    text = re.sub(r"([\\*_\[\]<>|#~$^{}])", r"\\\1", text)
    return re.sub(r"^(\d+)([.)])", r"\1\\\2", text)
