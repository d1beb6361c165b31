"""A Sphinx extension: makes the headers' names objects that the search finds, links to them, and shows the sources."""

import re
from pathlib import Path

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import CppLexer
from sphinx.domains import Domain, ObjType
from sphinx.util.docutils import SphinxDirective

KINDS = ("class", "struct", "enum", "function", "variable", "alias", "macro", "concept")
TYPES = ("class", "struct", "enum", "alias", "concept")


class Declared(nodes.Element):
    """Stands where a link to the header's line will be. Attributes: header, line and anchors."""


class Declares(SphinxDirective):
    """```{declares} HEADER LINE: its lines "anchor kind name" say what the section around it declares."""

    required_arguments = 2
    has_content = True

    def run(self):
        domain = self.env.domains["tessera"]
        declared = [line.split(" ", 2) for line in self.content]
        for anchor, kind, name in declared:
            domain.note(name, kind, self.env.current_document.docname, anchor)
        header, line = self.arguments
        return [Declared(header=header, line=line, anchors=[anchor for anchor, _, _ in declared])]


def declared_role(name, rawtext, text, lineno, inliner, options=None, content=None):
    """{declared}`HEADER NAME` links NAME to where HEADER's page has it."""
    header, declared = text.split(" ")
    return [nodes.literal(rawtext, declared, page="reference/" + header)], []


class TesseraDomain(Domain):
    """Holds what headers declare: name, kind, page and anchor."""

    name = "tessera"
    label = "Tessera"
    object_types = {kind: ObjType("C++ " + kind) for kind in KINDS}
    directives = {"declares": Declares}
    initial_data = {"objects": []}

    def note(self, name, kind, page, anchor):
        self.data["objects"].append((name, kind, page, anchor))

    def clear_doc(self, docname):
        self.data["objects"] = [each for each in self.data["objects"] if each[2] != docname]

    def merge_domaindata(self, docnames, otherdata):
        self.data["objects"] += [each for each in otherdata["objects"] if each[2] in docnames]

    def get_objects(self):
        seen = set()
        for name, kind, page, anchor in self.data["objects"]:
            if (name, page) not in seen:  # overloads are found by the first of them
                seen.add((name, page))
                yield name, name, kind, page, anchor, 1

    def places(self, kinds=KINDS):
        """Returns page and anchor of each name that is declared on one page only."""
        places = {}
        for name, kind, page, anchor in self.data["objects"]:
            if kind not in kinds:
                continue
            for spelled in {name, name.split("::", 1)[1] if name.startswith(("rules::", "testing::")) else name}:
                before = places.setdefault(spelled, (page, anchor))
                if before is not None and before[0] != page:
                    places[spelled] = None
        return {name: place for name, place in places.items() if place is not None}


def anchor_sections(app, doctree):
    for node in doctree.findall(Declared):
        node.parent["ids"][:0] = node["anchors"]


def link_names(app, doctree, docname):
    """Makes links of code spans that name a header or something that one declares, and of each Declared."""
    for node in list(doctree.findall(Declared)):
        uri = app.builder.get_relative_uri(docname, "source/" + node["header"]) + f"#L-{node['line']}"
        link = nodes.reference("", f"{node['header']}, line {node['line']}", refuri=uri, internal=True)
        node.replace_self(nodes.paragraph("", "", link, classes=["source"]))
    if docname == "docs/operators":
        return  # these are the names of LibTorch's operators
    places = app.env.domains["tessera"].places()
    for node in list(doctree.findall(nodes.literal)):
        if "page" in node:
            place = node["page"], node.astext()
        else:
            place = place_of(node.astext(), places, app.env.found_docs, docname)
        if place is None or is_left_alone(node):
            continue
        page, anchor = place
        uri = app.builder.get_relative_uri(docname, page) + (f"#{anchor}" if anchor else "")
        node.replace_self(nodes.reference("", "", node.deepcopy(), refuri=uri, internal=True))


def place_of(text, places, pages, docname):
    if re.fullmatch(r"[a-z_/]+\.h", text):
        page = "reference/" + text if "/" in text else docname.rsplit("/", 1)[0] + "/" + text
        return (page, "") if page in pages and page != docname else None
    name = text.removeprefix("tessera::").removesuffix("()")
    plain = re.fullmatch(r"[a-z]+", text)  # in a comment this is rather a parameter
    return None if plain and docname.startswith("reference/") else places.get(name)


def is_left_alone(node):
    """Links, titles, and the first column of tables, where other libraries' names stand, get no links."""
    while node.parent is not None:
        parent = node.parent
        if isinstance(parent, (nodes.reference, nodes.title)):
            return True
        if isinstance(parent, nodes.row) and parent.index(node) == 0:
            return True
        node = parent
    return False


_DECLARATION = re.compile(r'<div class="declaration highlight-cpp.*?</pre>', re.DOTALL)
_NAME = re.compile(r'<span class="(n|kt)">(\w+)</span>')


def link_types(app, pagename, templatename, context, doctree):
    """Links the types in declarations to the pages that declare them."""
    if not pagename.startswith("reference/") or "body" not in context:
        return
    types = app.env.domains["tessera"].places(TYPES)

    def link(match):
        page, anchor = types.get(match[2], (None, None))
        if page is None:
            return match[0]
        uri = (app.builder.get_relative_uri(pagename, page) if page != pagename else "") + "#" + anchor
        return f'<a href="{uri}">{match[0]}</a>'

    context["body"] = _DECLARATION.sub(lambda block: _NAME.sub(link, block[0]), context["body"])


def source_pages(app):
    formatter = HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True, wrapcode=True)
    root = Path(app.config.tessera_root)
    for header in app.config.tessera_headers:
        page = app.builder.get_relative_uri("source/" + header, "reference/" + header)
        code = highlight((root / header).read_text(), CppLexer(), formatter)
        title = f'<h1>{header}</h1><p><a href="{page}">What it declares</a></p>'
        yield "source/" + header, {"title": header, "body": title + code}, "page.html"


def setup(app):
    app.add_domain(TesseraDomain)
    app.add_directive("declares", Declares)
    app.add_role("declared", declared_role)
    app.add_node(Declared)
    app.add_config_value("tessera_root", "", "html")
    app.add_config_value("tessera_headers", [], "html")
    app.connect("doctree-read", anchor_sections)
    app.connect("doctree-resolved", link_names)
    app.connect("html-page-context", link_types)
    app.connect("html-collect-pages", source_pages)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
