"""Builds the site: build.py FOLDER. Copies the pages to a folder of its own, writes the reference, and runs Sphinx."""

import re
import shutil
import sys
import tempfile
from pathlib import Path

from reference import group_page, read_groups, write_reference
from sphinx.cmd.build import build_main

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def copy_pages(out):
    """Copies README.md as index.md, docs/*.md and CHANGELOG.md, and the files of other kinds that they link to."""
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text()
        for link in re.findall(r"\]\(([^)#:\s]+)\)", text):
            target = (page.parent / link).resolve()
            if target.suffix != ".md" and target.is_file():
                copy = out / target.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(target, copy)
        copy = out / ("index.md" if page.name == "README.md" else page.relative_to(ROOT))
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text.replace("](../README.md", "](../index.md"))
    with open(out / "index.md", "a") as index:
        index.write(contents(out))


def contents(out):
    """Returns the tables of contents: the pages in the order of README.md's list, then those that it does not name."""
    listed = re.findall(r"^- \[[^]]+\]\((docs/[^)#]+)\.md\)", (ROOT / "README.md").read_text(), re.MULTILINE)
    pages = list(dict.fromkeys(listed + [f"docs/{page.stem}" for page in sorted((out / "docs").glob("*.md"))]))
    reference = ["reference/index"] + [f"reference/{group_page(title)}" for title, _ in read_groups()]
    trees = [("Guides", pages), ("API reference", reference), ("Versions", ["CHANGELOG"])]
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(each) + "\n```\n" for caption, each in trees
    )


def build(work, folder):
    source, site = Path(work, "pages"), Path(work, "site")
    copy_pages(source)
    headers = write_reference(ROOT, source / "reference")
    settings = {"tessera_root": ROOT, "tessera_headers": ",".join(headers)}
    arguments = ["-b", "html", "-c", str(HERE), "-d", str(Path(work, "doctrees")), "--quiet"]
    arguments += ["--fail-on-warning", "--keep-going"] + [f"-D{name}={value}" for name, value in settings.items()]
    code = build_main(arguments + [str(source), str(site)])
    if code == 0:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(site, folder)
        print(f"docs: open {folder}/index.html in a browser")
    return code


def main(folder):
    folder = Path(folder).resolve()
    if folder.exists() and not (folder / "objects.inv").exists() and any(folder.iterdir()):
        print(f"docs: {folder} has other files than a site; name a new or an empty folder", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as work:
        return build(work, folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
