"""Settings of the site that `make docs` writes: the pages of the repository, and the API."""

import os

import trireme

project = "Trireme"
copyright = "the Trireme authors"
version = release = trireme.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "breathe"]

html_theme = "furo"
html_title = "Trireme " + trireme.__version__.split("+")[0]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "default"
highlight_language = "none"  # of what names no language: pictures in comments

myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 4  # [text](page.md#heading), as GitHub has it

# torch's own texts are written for another site: what has no text of ours is left out.
autodoc_default_options = {"members": True}
autodoc_inherit_docstrings = False
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

breathe_projects = {"trireme": os.environ["TRIREME_DOXYGEN_XML"]}
breathe_default_project = "trireme"
breathe_default_members = ("members", "undoc-members")
# What a declaration may begin with, and C++ does not know.
cpp_id_attributes = ["TRIREME_API"]
