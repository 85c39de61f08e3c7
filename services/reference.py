"""The API reference: Markdown pages made from the OpenAPI documents of the services.

What belongs here: reading a document and writing a page. What does not: what a service answers (its routes and
contract). Pages are made with default settings and without any part running, so they are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from lockstep.kernel.settings import PROJECT_ROOT, Settings

SERVICES: Final = ("exports", "ingest", "readiness", "vault")
FOLDER: Final = PROJECT_ROOT / "docs" / "api"
_METHODS: Final = ("get", "head", "post", "put", "patch", "delete")


def pages() -> dict[str, str]:
    """Every page by its file name, `README.md` included."""
    documents = {name: document(name) for name in SERVICES}
    made = {f"{name}.md": page(name, found) for name, found in documents.items()}
    return {"README.md": _index(documents), **made}


def document(service: str) -> dict[str, Any]:
    """The OpenAPI document of a service as a fresh deployment serves it."""
    defaults = Settings.model_construct()
    found: dict[str, Any] = import_module(f"services.{service}").create_app(defaults).openapi()
    return found


def write(folder: Path = FOLDER) -> list[Path]:
    """Write every page and take away the ones that no service has any more; return what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    made = pages()
    for old in set(folder.glob("*.md")) - {folder / name for name in made}:
        old.unlink()
    for name, text in made.items():
        (folder / name).write_text(text)
    return [folder / name for name in made]


def page(service: str, openapi: Mapping[str, Any]) -> str:
    """One service: its operations in the order of their paths, then its schemas."""
    info = openapi["info"]
    lines = [f"# {info['title']} {info['version']}", ""]
    lines += [_prose(info.get("description", "")), ""]
    lines += [f"Made by `lockstep docs api` from `GET /openapi.json` of `lockstep serve {service}`.", ""]
    lines += [*_operations_table(openapi), ""]
    for path, method, operation in _operations(openapi):
        lines += _operation(path, method, operation)
    schemas = openapi.get("components", {}).get("schemas", {})
    if schemas:
        lines += ["## Schemas", ""]
    for name in sorted(schemas):
        lines += _schema(name, schemas[name])
    return "\n".join(lines).rstrip() + "\n"


def _index(documents: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [
        "# API reference",
        "",
        "Made by `lockstep docs api`; a test compares these pages with what the services say. A running service shows",
        "the same as an interactive page at `/docs` and as a document at `/openapi.json`.",
        "",
        "| service | operations | what it is |",
        "|---|---|---|",
    ]
    for name, found in documents.items():
        about = _prose(found["info"].get("description", "")).replace("\n", " ").split(". ")[0].rstrip(".") + "."
        lines.append(f"| [{name}]({name}.md) | {len(list(_operations(found)))} | {_cell(about)} |")
    return "\n".join(lines) + "\n"


def _operations(openapi: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for path, methods in sorted(openapi["paths"].items()):
        for method in _METHODS:
            if method in methods:
                yield path, method.upper(), methods[method]


def _operations_table(openapi: Mapping[str, Any]) -> list[str]:
    rows = [
        f"| [`{method} {path}`](#{_anchor(f'{method} {path}')}) | {_cell(operation.get('summary', ''))} |"
        for path, method, operation in _operations(openapi)
    ]
    return ["| operation | |", "|---|---|", *rows]


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> list[str]:
    lines = [f"## {method} {path}", ""]
    lines += [f"**{operation.get('summary', '')}.** {_prose(operation.get('description', ''))}".strip(), ""]
    parameters = operation.get("parameters", [])
    if parameters:
        lines += ["| parameter | in | type | |", "|---|---|---|---|"]
        lines += [_parameter(parameter) for parameter in parameters]
        lines.append("")
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        needed = "" if operation["requestBody"].get("required") else ", optional"
        lines += [f"Body: `{kind}`{needed}, {_type(content.get('schema', {}))}.", ""]
    lines += ["| status | body | |", "|---|---|---|"]
    lines += [_response(status, response) for status, response in sorted(operation["responses"].items())]
    return [*lines, ""]


def _parameter(parameter: Mapping[str, Any]) -> str:
    must = " (required)" if parameter.get("required") else ""
    words = _cell(parameter.get("description", ""))
    return f"| `{parameter['name']}`{must} | {parameter['in']} | {_type(parameter.get('schema', {}))} | {words} |"


def _response(status: str, response: Mapping[str, Any]) -> str:
    bodies = [
        f"`{kind}`: {_type(content.get('schema', {}))}" for kind, content in sorted(response.get("content", {}).items())
    ]
    headers = ", ".join(f"`{name}`" for name in sorted(response.get("headers", {})))
    words = _cell(response.get("description", "")).rstrip(".") + (f". Headers: {headers}" if headers else "")
    return f"| {status} | {'; '.join(bodies)} | {words} |"


def _schema(name: str, schema: Mapping[str, Any]) -> list[str]:
    lines = [f"### {name}", ""]
    if schema.get("description"):
        lines += [_prose(schema["description"]), ""]
    properties = schema.get("properties", {})
    if not properties:
        return [*lines, f"{_type(schema)}.", ""]
    lines += ["| field | type | |", "|---|---|---|"]
    for field, inner in properties.items():
        must = " (required)" if field in schema.get("required", []) else ""
        words = _cell(inner.get("description", ""))
        lines.append(f"| `{field}`{must} | {_type(inner)} | {words} |")
    return [*lines, ""]


def _type(schema: Mapping[str, Any]) -> str:
    """A schema in a few words; names of schemas are links within the page."""
    if reference := schema.get("$ref"):
        name = str(reference).rpartition("/")[2]
        return f"[{name}](#{_anchor(name)})"
    for joint in ("anyOf", "oneOf", "allOf"):
        if joint in schema:
            return " or ".join(dict.fromkeys(_type(one) for one in schema[joint]))
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    kind = schema.get("type", "anything")
    return str(kind if isinstance(kind, str) else " or ".join(kind)) + _limits(schema)


def _limits(schema: Mapping[str, Any]) -> str:
    told = [f"{schema['format']}"] if "format" in schema else []
    words = {"minimum": "≥", "maximum": "≤", "minLength": "length ≥", "maxLength": "length ≤"}
    told += [f"{sign} {schema[name]}" for name, sign in words.items() if name in schema]
    if "pattern" in schema:
        told.append("`" + str(schema["pattern"]).replace("|", "\\|") + "`")
    return f" ({', '.join(told)})" if told else ""


def _anchor(heading: str) -> str:
    kept = "".join(letter for letter in heading.lower() if letter.isalnum() or letter in "-_ ")
    return kept.replace(" ", "-")


def _prose(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
