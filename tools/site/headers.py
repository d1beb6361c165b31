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
    reader = _Reader(source)
    entries = []
    reader.read_scope(tree.root_node, "", entries)
    return entries


class _Reader:
    def __init__(self, source):
        self.source = source
        self.lines = source.decode().split("\n")

    def text(self, begin, end):
        """Returns a piece of source with the indentation of its first line taken from every line."""
        first_line = self.source.rfind(b"\n", 0, begin) + 1
        indent = len(self.source[first_line:begin]) - len(self.source[first_line:begin].lstrip())
        lines = self.source[begin:end].decode().rstrip().split("\n")
        return "\n".join([lines[0]] + [line[indent:] if not line[:indent].strip() else line for line in lines[1:]])

    def read_scope(self, scope, namespace, entries, in_class=None):
        """Appends the entries of a file, a namespace or a class body. `in_class` is the class's name."""
        visible = in_class is None or scope.parent.type != "class_specifier"
        is_public = in_class is not None or namespace in PUBLIC_NAMESPACES
        comment, comment_end, end = [], -2, -2  # rows
        shown, protected = None, False  # the declaration of the node before, if users see it
        for node in scope.children:
            row = node.start_point[0]
            if node.type == "comment":
                if row == end or (not comment and row == end + 1 and self._continues_trailing(node)):
                    if shown is not None and b"NOLINT" not in node.text:
                        self._add_trailing(node, shown, row == end)
                    end = row
                    continue
                if comment and row > comment_end + 1:
                    self._add_alone(comment, visible and is_public, entries)
                    comment = []
                comment.append((node.start_point[1], self.source[node.start_byte : node.end_byte].decode()[2:]))
                comment_end = node.end_point[0]
                continue
            if node.type in ("{", "}", ";", ":"):
                continue
            shown = None
            if comment and row > comment_end + 1:
                self._add_alone(comment, visible and (is_public or node.type == "namespace_definition"), entries)
                comment = []
            if node.type == "namespace_definition":
                # A comment right above a namespace is about the whole header.
                self._add_alone(comment, True, entries)
                name = node.child_by_field_name("name").text.decode()
                self.read_scope(node.child_by_field_name("body"), f"{namespace}::{name}".strip(":"), entries)
            elif node.type == "access_specifier":
                visible, protected = node.text != b"private", node.text == b"protected"
                end = -2
                continue
            elif visible and (is_public or node.type.startswith("preproc")):
                shown = self.declaration(node)
                if shown is not None:
                    self._add(shown, node, comment, row == end + 1, namespace, entries)
                    entries[-1].protected = protected
            comment = []
            end = node.end_point[0]

    def _add(self, declaration, node, comment, adjacent, namespace, entries):
        body = _class_body(node)
        last = entries[-1] if entries else None
        joins = not comment and adjacent and last and last.declarations and body is None
        if not joins or last.declarations[-1].kind in ("class", "struct"):
            last = Entry(comment=comment, namespace=namespace)
            entries.append(last)
        last.declarations.append(declaration)
        if body is not None:
            self.read_scope(body, namespace, last.members, declaration.names[0])

    @staticmethod
    def _add_alone(comment, wanted, entries):
        if comment and wanted and not comment[0][1].lstrip().startswith("clang-format"):
            entries.append(Entry(comment=comment))

    def _continues_trailing(self, node):
        """Says whether this comment is the second line of one that stands behind a declaration."""
        before = self.lines[node.start_point[0] - 1]
        column = node.start_point[1]
        return before[column : column + 2] == "//" and before[:column].strip() != ""

    def _add_trailing(self, node, declaration, same_line):
        text = self.source[node.start_byte : node.end_byte].decode()
        if same_line:
            before = self.lines[node.start_point[0]][: node.start_point[1]]
            declaration.text += " " * (len(before) - len(before.rstrip())) + text
        else:
            width = declaration.text.split("\n")[-1].index("//")
            declaration.text += "\n" + " " * width + text

    def declaration(self, node):
        """Returns what a node declares; None for forward declarations and what users do not name."""
        line = node.start_point[0] + 1
        if node.type in ("preproc_def", "preproc_function_def"):
            parameters = node.child_by_field_name("parameters")
            name = node.child_by_field_name("name").text.decode()
            if name.endswith("_"):
                return None  # a part of another macro
            return Declaration("macro", [name], name + (parameters.text.decode() if parameters else ""), line)
        inner = node
        while inner.type == "template_declaration":
            inner = [child for child in inner.children if child.type not in ("comment", ";")][-1]
        if inner.type in ("field_declaration", "declaration"):
            specifier = inner.child_by_field_name("type")
            if specifier is not None and specifier.type in CLASSES + ("enum_specifier",):
                if inner.child_by_field_name("declarator") is None:
                    inner = specifier
        if inner.type in CLASSES:
            return self._class(node, inner, line)
        if inner.type == "enum_specifier":
            if inner.child_by_field_name("body") is None:
                return None
            return Declaration("enum", [_name(inner)], self.text(node.start_byte, inner.end_byte) + ";", line)
        if inner.type == "friend_declaration":
            text = self._without_body(node, _descendant(inner, "compound_statement"))
            return Declaration("friend", [], text, line)
        if inner.type in ("alias_declaration", "concept_definition"):
            kind = "alias" if inner.type == "alias_declaration" else "concept"
            return Declaration(kind, [_name(inner)], self._without_body(node, None), line)
        if inner.type == "using_declaration":
            name = node.text.decode().rstrip(";").split("::")[-1]
            return Declaration("alias", [name], self._without_body(node, None), line)
        if inner.type == "expression_statement":
            holder = re.fullmatch(r"TORCH_MODULE\((\w+)\);", node.text.decode())
            return Declaration("holder", [holder[1]], holder[0], line) if holder else None
        if inner.type not in ("function_definition", "declaration", "field_declaration"):
            return None
        return self._function_or_variable(node, inner, line)

    def _class(self, node, inner, line):
        body = inner.child_by_field_name("body")
        if body is None:
            return None
        kind = "class" if inner.type == "class_specifier" else "struct"
        return Declaration(kind, [_name(inner)], self.text(node.start_byte, body.start_byte), line)

    def _function_or_variable(self, node, inner, line):
        names, is_function = [], False
        for declarator in inner.children_by_field_name("declarator"):
            name, function = _declared(declarator)
            names.append(name)
            is_function = is_function or function
        if inner.type == "function_definition":
            stop = inner.child_by_field_name("body")
            initializers = [child for child in inner.children if child.type == "field_initializer_list"]
            return Declaration("function", names, self._without_body(node, (initializers + [stop])[0]), line)
        return Declaration("function" if is_function else "variable", names, self._without_body(node, None), line)

    def _without_body(self, node, body):
        if body is None or body.type in ("default_method_clause", "delete_method_clause", "pure_virtual_clause"):
            return self.text(node.start_byte, node.end_byte).rstrip(";") + ";"
        return self.text(node.start_byte, body.start_byte).rstrip() + ";"


def _class_body(node):
    inner = node
    while inner.type == "template_declaration":
        inner = [child for child in inner.children if child.type not in ("comment", ";")][-1]
    if inner.type in ("field_declaration", "declaration") and inner.child_by_field_name("declarator") is None:
        inner = inner.child_by_field_name("type") or inner
    return inner.child_by_field_name("body") if inner.type in CLASSES else None


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
