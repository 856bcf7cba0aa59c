"""Templates of pages, which are files in this package."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape


def render_template(package: str, template: str, /, **values: Any) -> str:
    """Fill in a template.

    Args:
        package: The package whose folder contains the template.
        template: Name of its file. In ``.html.jinja`` files, values are escaped.
        values: Its variables.
    """
    loader, escape = PackageLoader(package, "."), select_autoescape(("html.jinja",))
    environment = Environment(
        loader=loader, autoescape=escape, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(values)
