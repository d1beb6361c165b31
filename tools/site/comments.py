"""Turns a header's comment into Markdown: paragraphs, lists and examples as its author laid them out.

Comments are plain text. A line that starts with two blanks is part of an example, unless it is an item of a list
("  - ") or continues one. A line that ends although the next word would have fitted ends a paragraph.
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
    r"|(?<![\w:/.])(?P<camel>[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)+)\b"  # CamelCase, where it is a name of ours
    r"|(?<![\w:/.])k[A-Z]\w+\b"
)


def to_markdown(comment, names=()):
    """Returns the Markdown of a comment, given as (column, text behind "//") per line. `names` are the library's."""
    blocks = []
    for kind, lines in _blocks(comment):
        if kind == "example":
            code = "\n".join(lines)
            blocks.append(f"```{'cpp' if _is_cpp(code) else 'text'}\n{code}\n```")
        elif kind == "item":
            blocks.append("- " + _prose(" ".join(lines), names))
        else:
            blocks.append(_prose(" ".join(lines), names))
    text = "\n\n".join(blocks)
    return re.sub(r"(?m)^(- .*)\n\n(?=- )", r"\1\n", text)


def split_title(comment):
    """Returns the title in a first line such as "---- for a Shard ----", or None, and the rest of the comment."""
    found = _SEPARATOR.fullmatch(comment[0][1].strip()) if comment else None
    return (found[1], comment[1:]) if found else (None, comment)


def _blocks(comment):
    """Yields "text", "item" or "example", and the lines of each such part."""
    kind, lines = None, []
    for index, (_, raw) in enumerate(comment):
        text = raw.removeprefix(" ")
        found = _kind(text, kind)
        ends = found == "text" == kind and _ends_paragraph(comment[index - 1], text)
        if lines and (found != kind or ends or text.lstrip().startswith("- ")):
            yield kind, _dedented(lines, kind)
            lines = []
        kind = found
        if kind:
            lines.append(text)
    if lines:
        yield kind, _dedented(lines, kind)


def _kind(text, before):
    """Returns None for an empty line. `before` is the kind of the line above."""
    if not text.strip():
        return None
    if text.lstrip().startswith("- ") or (before == "item" and text.startswith("    ")):
        return "item"
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
