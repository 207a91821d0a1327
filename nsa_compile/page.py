"""Pages that need nothing but themselves: no script, no network, readable in light and dark and on a narrow screen."""

from __future__ import annotations

import base64
import io
import time
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import DictLoader, Environment, StrictUndefined

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def render(package: str, template: str, *, name: str, directory: Path, problems: list[str], **values: Any) -> str:
    """The page that `template`, a file of `package` that extends `page.html`, makes of `values`. Everything is escaped.

    Args:
        name: the headline.
        directory: what the page is about, shown below it.
        problems: what is missing or damaged, shown first.
    """
    sources = {
        **{name: (resources.files(__package__) / name).read_text("utf-8") for name in ("page.html", "figure.html")},
        template: (resources.files(package) / template).read_text("utf-8"),
    }
    environment = Environment(
        loader=DictLoader(sources), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    written = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return environment.get_template(template).render(
        name=name, directory=str(directory), written=written, problems=problems, **values
    )


def png(figure: Figure) -> bytes:
    """A figure as the content of a PNG file."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


def embed(content: bytes) -> str:
    """The address under which a page holds the PNG itself."""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"
