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
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.loader = PackageLoader(package, ".")
    environment.autoescape = select_autoescape(("html.jinja",))
    return environment.get_template(template).render(values)
