"""The documentation site: `make docs` builds it in build/docs, without a network and without warnings.

Tables and outputs are generated from the code when the site is built; see `_ext/`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# With this variable, the hub's library warns while transformers is imported, and warnings are errors.
os.environ.pop("HF_HUB_DISABLE_PROGRESS_BARS", None)
sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from gptkit import __version__

project = "gptkit"
author = "The gptkit developers"
project_copyright = "The gptkit developers"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "docstrings", "generated", "mathml"]
exclude_patterns = ["_ext"]
nitpicky = True
# Names of other packages, and gptkit's own names that a sentence describes, have no page here.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|numpy|np|pathlib|collections|typing|msgspec|fractions|argparse)\..*"),
    ("py:.*", r"(Any|Callable|ClassVar|Device|Iterable|Iterator|Literal|Mapping|Path|Sequence|optional|np\.ndarray)"),
    ("py:.*", r"gptkit\.(?!errors\.|spec\.(ModelSpec|Parameter)$).*"),
]

# Markdown: $formulas$, lists of terms, and an anchor for every heading down to the third level.
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

smartquotes = False  # options begin with "--"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_use_type_comments = False
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = "gptkit"
html_static_path = ["_static"]
html_css_files = ["gptkit.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_search_summary = False  # summaries are fetched, which pages on the disk cannot do
html_last_updated_fmt = None
highlight_language = "none"
pygments_style = "default"
pygments_dark_style = "monokai"
