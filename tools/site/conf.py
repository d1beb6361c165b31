"""Sphinx's configuration of the site; build.py passes what depends on the tree."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

project = "Tessera"
extensions = ["myst_parser", "extension"]
myst_heading_anchors = 4
smartquotes = False
nitpicky = True

html_theme = "furo"
html_title = "Tessera"
html_static_path = [str(HERE / "static")]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_permalinks_icon = "#"
# A page that is opened as a file may not read others, from which summaries would be made.
html_show_search_summary = False
