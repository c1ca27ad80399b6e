"""The course as web pages: Sphinx with MyST-Parser and the theme Furo, and what these do not have (pages.py)."""

from importlib.util import find_spec


def check_installed(*beside: str) -> None:
    """Raises ValueError if what makes pages, and what slides take beside that, is not there."""
    needed = ("sphinx", "myst_parser", "furo", "sphinx_copybutton", *beside)
    if missing := [name for name in needed if find_spec(name) is None]:
        what = f"pages and slides are made with Sphinx and its parts, and {', '.join(missing)} cannot be imported"
        raise ValueError(f'{what}: pip install -e ".[site]"')
