"""Reads a C++ header: which names it declares to users, under which comments, and in which lines.

The syntax tree is tree-sitter's, so that nothing needs to be compiled. Comments and declarations are kept as the header
writes them. One comment may stand above several declarations that follow each other without an empty line: they form
one Entry, as they do for a reader of the header.
"""

import re
from dataclasses import dataclass, field

import tree_sitter_cpp
from tree_sitter import Language, Parser

# Names in other namespaces, such as tessera::detail, are not for users.
PUBLIC_NAMESPACES = ("tessera", "tessera::rules", "tessera::testing")

# The grammar does not know these: LibTorch's macro among members, and an empty list as a parameter's default. Blanks of
# the same length take their place when the tree is made.
_MASKED = re.compile(rb"FORWARD_HAS_DEFAULT_ARGS\(.*\)|(?<=\w) = \{\}(?=[,)])")

CLASSES = ("class_specifier", "struct_specifier", "union_specifier")


@dataclass
class Declaration:
    kind: str  # class, struct, holder, enum, function, variable, alias, macro, concept or friend
    names: list[str]
    text: str  # as in the header, without bodies of functions and classes
    line: int  # counts from 1


@dataclass
class Entry:
    comment: list[tuple[int, str]] = field(default_factory=list)  # column and text behind "//", per line
    declarations: list[Declaration] = field(default_factory=list)  # none: a comment that stands alone
    members: list["Entry"] = field(default_factory=list)  # of a class: its public and protected ones
    namespace: str = ""
    protected: bool = False

    @property
    def line(self):
        return self.declarations[0].line


def read_header(path):
    """Returns the entries of a header, in its order."""
    with open(path, "rb") as file:
        source = file.read()
    tree = Parser(Language(tree_sitter_cpp.language())).parse(_MASKED.sub(lambda match: b" " * len(match[0]), source))
    entries = []
    _Scope(_Source(source), tree.root_node, "", entries).read()
    return entries


class _Scope:
    """Reads a file, a namespace or the body of a class into `entries`, one child of its node after the other."""

    def __init__(self, source, node, namespace, entries, in_class=False):
        self.source, self.node, self.namespace, self.entries = source, node, namespace, entries
        self.is_public = in_class or namespace in PUBLIC_NAMESPACES
        self.visible = not in_class or node.parent.type != "class_specifier"
        self.protected = False
        self.comment, self.comment_end = [], -2  # the comment above the next child, and its last row
        self.shown, self.end = None, -2  # what the last child declares, if users see it, and its last row

    def read(self):
        for node in self.node.children:
            if node.type == "comment":
                self.read_comment(node)
            elif node.type not in ("{", "}", ";", ":"):
                self.read_node(node)

    def read_comment(self, node):
        row = node.start_point[0]
        if row == self.end or (not self.comment and row == self.end + 1 and self.source.continues_trailing(node)):
            self.read_trailing(node, row == self.end)
            self.end = row
            return
        self.end_comment(row)
        self.comment.append((node.start_point[1], self.source.comment_text(node)[2:]))
        self.comment_end = node.end_point[0]

    def read_trailing(self, node, same_line):
        """Adds a comment that stands behind a declaration to its text."""
        if self.shown is None or b"NOLINT" in node.text:
            self.shown = None
        elif same_line:
            self.shown.text += self.source.blanks_before(node) + self.source.comment_text(node)
        else:
            width = self.shown.text.split("\n")[-1].index("//")
            self.shown.text += "\n" + " " * width + self.source.comment_text(node)

    def end_comment(self, row, wanted=False):
        """Makes the comment an entry of its own if an empty line is between it and `row`."""
        if self.comment and row > self.comment_end + 1:
            self.add_alone(self.visible and (self.is_public or wanted))

    def add_alone(self, wanted):
        if self.comment and wanted and not self.comment[0][1].lstrip().startswith("clang-format"):
            self.entries.append(Entry(comment=self.comment))
        self.comment = []

    def read_node(self, node):
        self.shown = None
        self.end_comment(node.start_point[0], wanted=node.type == "namespace_definition")
        if node.type == "access_specifier":
            self.visible, self.protected = node.text != b"private", node.text == b"protected"
            self.end = -2  # what follows is not joined with what was before
            return
        if node.type == "namespace_definition":
            self.add_alone(True)  # a comment right above a namespace is about the whole header
            name = f"{self.namespace}::{node.child_by_field_name('name').text.decode()}".strip(":")
            _Scope(self.source, node.child_by_field_name("body"), name, self.entries).read()
        elif self.visible and (self.is_public or node.type.startswith("preproc")):
            self.shown = self.source.declaration(node)
            if self.shown is not None:
                self.add_declaration(node)
        self.comment = []
        row, column = node.end_point
        self.end = row if column > 0 else row - 1  # a directive ends where the next row begins

    def add_declaration(self, node):
        inner = _innermost(node)
        body = inner.child_by_field_name("body") if inner.type in CLASSES else None
        last = self.entries[-1] if self.entries else None
        adjacent = node.start_point[0] == self.end + 1
        joins = not self.comment and adjacent and last and last.declarations and body is None
        if not joins or last.declarations[-1].kind in ("class", "struct"):
            last = Entry(comment=self.comment, namespace=self.namespace, protected=self.protected)
            self.entries.append(last)
        last.declarations.append(self.shown)
        if body is not None:
            _Scope(self.source, body, self.namespace, last.members, in_class=True).read()


class _Source:
    """Turns nodes of a header's syntax tree into text and declarations."""

    def __init__(self, source):
        self.source = source
        self.lines = source.decode().split("\n")

    def text(self, begin, end):
        """Returns a piece of source with the indentation of its first line taken from every line."""
        first_line = self.source.rfind(b"\n", 0, begin) + 1
        indent = len(self.source[first_line:begin]) - len(self.source[first_line:begin].lstrip())
        lines = self.source[begin:end].decode().rstrip().split("\n")
        return "\n".join([lines[0]] + [line[indent:] if not line[:indent].strip() else line for line in lines[1:]])

    def comment_text(self, node):
        return self.source[node.start_byte : node.end_byte].decode()

    def blanks_before(self, node):
        before = self.lines[node.start_point[0]][: node.start_point[1]]
        return " " * (len(before) - len(before.rstrip()))

    def continues_trailing(self, node):
        """Says whether this comment is the second line of one that stands behind a declaration."""
        before = self.lines[node.start_point[0] - 1]
        column = node.start_point[1]
        return before[column : column + 2] == "//" and before[:column].strip() != ""

    def declaration(self, node):
        """Returns what a node declares; None for forward declarations and what users do not name."""
        line = node.start_point[0] + 1
        inner = _innermost(node)
        if node.type in ("preproc_def", "preproc_function_def"):
            return _macro(node, line)
        if inner.type in CLASSES + ("enum_specifier",):
            return self.type(node, inner, line)
        if inner.type == "friend_declaration":
            body = _descendant(inner, "compound_statement")
            return Declaration("friend", [], self.without_body(node, body), line)
        if inner.type in ("alias_declaration", "concept_definition"):
            kind = "alias" if inner.type == "alias_declaration" else "concept"
            return Declaration(kind, [_name(inner)], self.without_body(node, None), line)
        if inner.type == "using_declaration":
            name = node.text.decode().rstrip(";").split("::")[-1]
            return Declaration("alias", [name], self.without_body(node, None), line)
        if inner.type == "expression_statement":
            holder = re.fullmatch(r"TORCH_MODULE\((\w+)\);", node.text.decode())
            return Declaration("holder", [holder[1]], holder[0], line) if holder else None
        if inner.type in ("function_definition", "declaration", "field_declaration"):
            return self.function_or_variable(node, inner, line)
        return None

    def type(self, node, inner, line):
        body = inner.child_by_field_name("body")
        if body is None:
            return None
        if inner.type == "enum_specifier":
            return Declaration("enum", [_name(inner)], self.text(node.start_byte, inner.end_byte) + ";", line)
        kind = "class" if inner.type == "class_specifier" else "struct"
        return Declaration(kind, [_name(inner)], self.text(node.start_byte, body.start_byte), line)

    def function_or_variable(self, node, inner, line):
        names, is_function = [], False
        for declarator in inner.children_by_field_name("declarator"):
            name, function = _declared(declarator)
            names.append(name)
            is_function = is_function or function
        if inner.type == "function_definition":
            bodies = [child for child in inner.children if child.type == "field_initializer_list"]
            bodies.append(inner.child_by_field_name("body"))
            return Declaration("function", names, self.without_body(node, bodies[0]), line)
        return Declaration("function" if is_function else "variable", names, self.without_body(node, None), line)

    def without_body(self, node, body):
        if body is None or body.type in ("default_method_clause", "delete_method_clause", "pure_virtual_clause"):
            return self.text(node.start_byte, node.end_byte).rstrip(";") + ";"
        return self.text(node.start_byte, body.start_byte).rstrip() + ";"


def _innermost(node):
    """Returns the declaration within a template, and the class or enum within a declaration of nothing else."""
    while node.type == "template_declaration":
        node = [child for child in node.children if child.type not in ("comment", ";")][-1]
    if node.type in ("field_declaration", "declaration") and node.child_by_field_name("declarator") is None:
        specifier = node.child_by_field_name("type")
        if specifier is not None and specifier.type in CLASSES + ("enum_specifier",):
            return specifier
    return node


def _macro(node, line):
    parameters = node.child_by_field_name("parameters")
    name = node.child_by_field_name("name").text.decode()
    if name.endswith("_"):
        return None  # a part of another macro
    return Declaration("macro", [name], name + (parameters.text.decode() if parameters else ""), line)


def _name(node):
    name = node.child_by_field_name("name")
    return re.sub(r"\s+", " ", name.text.decode()) if name is not None else ""


def _descendant(node, kind):
    for child in node.children:
        found = child if child.type == kind else _descendant(child, kind)
        if found is not None:
            return found
    return None


def _declared(declarator):
    """Returns the name that a declarator declares, and whether it is a function."""
    function = False
    while True:
        if declarator.type == "operator_cast":
            return declarator.text.decode().split("(")[0].strip(), True
        if declarator.type == "function_declarator":
            function = True
        inner = declarator.child_by_field_name("declarator")
        if inner is None and declarator.type in ("reference_declarator", "parenthesized_declarator"):
            inner = [child for child in declarator.children if child.is_named][-1]
        if inner is None:
            break
        declarator = inner
    text = declarator.text.decode()
    return text, function
