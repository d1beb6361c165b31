"""Checks a site's links: links.py SITE. Every file and anchor must be there, and nothing may be fetched from a network.

Prints what is wrong, and exits non-zero if anything is.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Holds the anchors of a page, and its links as (tag, target)."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links = set(), []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.anchors.update(attributes[key] for key in ("id", "name") if attributes.get(key))
        self.links += [(tag, attributes[key]) for key in ("href", "src", "action") if attributes.get(key)]


def problem_of(path, tag, target, pages):
    """Returns what is wrong with one link of the page at `path`, or None."""
    parts = urlsplit(target)
    if parts.scheme == "data":
        return None
    if parts.scheme or parts.netloc:
        return None if tag == "a" else "is not in the site"
    file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not file.is_file():
        return "is not there"
    if parts.fragment and file in pages and unquote(parts.fragment) not in pages[file].anchors:
        return "has no such anchor"
    return None


def main(site):
    site = Path(site).resolve()
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    problems, links = [], 0
    for path, page in pages.items():
        for tag, target in page.links:
            links += 1
            problem = problem_of(path, tag, target, pages)
            if problem:
                problems.append(f"{path.relative_to(site)}: <{tag}> {target} {problem}")
    for path in sorted(site.rglob("*.css")):
        for target in re.findall(r"""(?:url\(\s*|@import\s+)['"]?((?:https?:)?//[^'")\s]+)""", path.read_text()):
            problems.append(f"{path.relative_to(site)}: {target} is not in the site")
    print("\n".join(problems))
    print(f"{len(pages)} pages, {links} links, {len(problems)} problems")
    return 1 if problems or not links else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
