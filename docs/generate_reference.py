"""MkDocs hook: write the command-line and HTTP references from the commands and the OpenAPI schema themselves."""

from __future__ import annotations

import enum
import math
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import typer.main


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Append the generated part to the two reference pages, and fill in the tables of settings."""
    if page.file.src_uri == "reference/cli.md":
        return markdown + "\n" + "\n".join(command_line())
    if page.file.src_uri == "reference/http.md":
        return markdown + "\n" + "\n".join(http())
    from arpg.settings import SETTINGS, TASK_SETTINGS

    for comment, table in (("<!-- settings -->", SETTINGS), ("<!-- task settings -->", TASK_SETTINGS)):
        if comment in markdown:
            markdown = markdown.replace(comment, "\n".join(settings(table)))
    return markdown


def settings(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of settings; a page gets it in the place of `<!-- settings -->` or `<!-- task settings -->`."""
    yield "| setting | option | values | also accepted | meaning |\n|---|---|---|---|---|"
    for setting in table.values():
        kind = {int: "integer", float: "number", str: "text"}[setting.kind]
        values = " ".join(f"`{name}`" for name in setting.names) or kind
        option = {"num_images": "-n"}.get(setting.name, "--" + setting.name.replace("_", "-"))
        also = " ".join(f"`{name}`" for name in setting.aliases)
        yield f"| `{setting.name}` | `{option}` | {values} | {also} | {_cell(setting.help)} |"
    for setting in table.values():
        if setting.choices:
            yield f"\nValues of `{setting.name}`:\n"
            yield from (f"- `{name}`: {text}" for name, text in setting.choices.items())


def command_line() -> Iterator[str]:
    """Yield the Markdown of every command of `arpg`."""
    from arpg.cli import app

    root = typer.main.get_command(app)
    for name, command in root.commands.items():
        if not command.hidden:
            yield from _command(f"arpg {name}", command, 2)


def _command(name: str, command: Any, level: int) -> Iterator[str]:
    children = getattr(command, "commands", {})
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help" and not p.hidden]
    yield f"{'#' * level} {name}\n"
    yield f"{_text(command.help)}\n"
    usage = [name, *(["[OPTIONS]"] if options else []), *(["COMMAND"] if children else [])]
    usage += [_argument(p) for p in arguments]
    yield f"```text\n{' '.join(usage)}\n```\n"
    if arguments:
        yield "| argument | meaning |\n|---|---|"
        yield from (f"| `{p.name.upper()}` | {_text(p.help)} |" for p in arguments)
        yield ""
    if options:
        yield "| option | value | default | meaning |\n|---|---|---|---|"
        yield from (_option(p) for p in options)
        yield ""
    for child, under in children.items():
        yield from _command(f"{name} {child}", under, level + 1)


def _argument(param: Any) -> str:
    name = param.name.upper() + ("..." if param.nargs == -1 else "")
    return name if param.required else f"[{name}]"


def _option(param: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
    default = param.default
    if callable(default) or default is False or default in (None, "", (), []):
        default = None
    shown = "required" if param.required else "" if default is None else f"`{getattr(default, 'value', default)}`"
    return f"| {names} | {_cell(_value(param))} | {_cell(shown)} | {_cell(_text(param.help))} |"


def _value(param: Any) -> str:
    if param.is_flag:
        return ""
    if param.metavar:
        return str(param.metavar)
    kind = param.type_descriptor.annotation
    repeated = ", repeatable" if param.multiple else ""
    kind = next((each for each in typing.get_args(kind) if each is not type(None)), kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return " ".join(f"`{choice.value}`" for choice in kind) + repeated
    return {"str": "text", "int": "integer", "float": "number"}.get(kind.__name__, kind.__name__.lower()) + repeated


def http() -> Iterator[str]:
    """Yield the Markdown of every route, from the OpenAPI schema of a server whose model is not loaded."""
    schema = _schema()
    parts = schema["components"]["schemas"]
    used: set[str] = set()
    yield "## Routes\n"
    yield "| route | meaning |\n|---|---|"
    routes = [(path, verb, route) for path, verbs in schema["paths"].items() for verb, route in verbs.items()]
    for path, verb, route in routes:
        yield f"| [`{verb.upper()} {path}`](#{_anchor(verb, path)}) | {_cell(_first(route))} |"
    yield ""
    for path, verb, route in routes:
        yield f"## {verb.upper()} {path} {{#{_anchor(verb, path)}}}\n"
        yield f"{_text(route.get('description') or route.get('summary'))}\n"
        for kind, content in route.get("requestBody", {}).get("content", {}).items():
            yield f"Request body, `{kind}`:\n"
            body = _resolve(content["schema"], parts)
            used |= _referenced(body)
            yield from _fields(body)
        yield "Responses:\n"
        yield from (f"- `{code}`: {_text(found.get('description'))}" for code, found in route["responses"].items())
        yield ""
    for name in sorted(used):
        yield f"## {name}\n"
        yield f"{_text(parts[name].get('description'))}\n"
        yield from _fields(parts[name])


def _schema() -> dict[str, Any]:
    from arpg.config import DEFAULT_MODEL
    from arpg.serve.app import create_app
    from arpg.serve.served_model import ServedModel
    from arpg.serve.service import ImageService

    def load() -> Any:
        raise AssertionError("the reference needs no model")

    schema: dict[str, Any] = create_app(ImageService([ServedModel(DEFAULT_MODEL, load)])).openapi()
    return schema


def _anchor(verb: str, path: str) -> str:
    return verb + "".join(character if character.isalnum() else "-" for character in path)


def _first(route: dict[str, Any]) -> str:
    return _text(route.get("description") or route.get("summary")).split("\n")[0]


def _resolve(schema: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    return parts[schema["$ref"].rsplit("/", 1)[-1]] if "$ref" in schema else schema


def _referenced(schema: Any) -> set[str]:
    """Return the names of the types that a schema refers to."""
    if isinstance(schema, dict):
        own = {schema["$ref"].rsplit("/", 1)[-1]} if "$ref" in schema else set()
        return own.union(*(_referenced(value) for value in schema.values()))
    return set().union(*map(_referenced, schema)) if isinstance(schema, list) else set()


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    required = schema.get("required", [])
    yield "| field | type | default | meaning |\n|---|---|---|---|"
    for name, field in schema.get("properties", {}).items():
        default = "required" if name in required else "" if field.get("default") is None else f"`{field['default']}`"
        kind, help_text = _cell(_type(field)), _cell(_text(field.get("description")))
        yield f"| `{name}` | {kind} | {_cell(default)} | {help_text} |"
    yield ""


def _type(field: dict[str, Any]) -> str:
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in field:
        return " or ".join(kind for kind in (_type(each) for each in field["anyOf"]) if kind != "null")
    if "enum" in field:
        return " ".join(f"`{value}`" for value in field["enum"])
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {})) or 'anything'}"
    limits = [f"{word} {_number(field[key])}" for key, word in _LIMITS.items() if key in field]
    limits += [f"of at most {_number(field['maxLength'])} characters"] if "maxLength" in field else []
    return " ".join([str(field.get("type", "anything")), *limits])


_LIMITS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to"}


def _number(value: float) -> str:
    if value >= 1e9 and float(value) == 2.0 ** round(math.log2(value)):
        return f"2^{round(math.log2(value))}"
    return f"{value:,g}" if value != int(value) else f"{int(value):,}"


def _text(text: str | None) -> str:
    return " ".join((text or "").split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
