"""The course as web pages: Sphinx with MyST-Parser and the theme Furo, and what these do not have (pages.py)."""

from importlib.util import find_spec


def check_installed() -> None:
    """Raises ValueError if what makes pages is not there."""
    if missing := [name for name in ("sphinx", "myst_parser", "furo", "sphinx_copybutton") if find_spec(name) is None]:
        what = f"pages and slides are made with Sphinx and its parts, and {', '.join(missing)} cannot be imported"
        raise ValueError(f'{what}: pip install -e ".[site]"')
