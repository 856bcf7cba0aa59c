"""Templates of pages, which are files in this package."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape


def render_template(package: str, template: str, /, **values: Any) -> str:
    """Render a template.

    Args:
        package: The package whose folder contains the template.
        template: File name of the template. In ``.html.jinja`` files, values are escaped.
        **values: Variables of the template. An undefined variable is an error.
    """
    loader, escape = PackageLoader(package, "."), select_autoescape(("html.jinja",))
    environment = Environment(
        loader=loader, autoescape=escape, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(values)
