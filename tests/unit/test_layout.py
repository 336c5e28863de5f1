"""The shape of the code base: imports run one way without cycles, and every public name has a docstring."""

import ast

from support.paths import ROOT

SOURCE = ROOT / "src" / "arpg"

# Each may import what stands before it (and its own package). Nothing but `python -m arpg` imports cli.
LAYERS = [
    {"errors"},
    {"storage"},
    {"executor", "files", "settings", "classes", "tables"},
    {"config"},
    {"device", "image"},
    {"noise"},
    {"kernels"},
    {"tokenizer", "model"},
    {"quantization"},
    {"text_encoder"},
    {"checkpoint"},
    {"convert"},
    {"hub"},
    {"extractors", "lora"},
    {"decode"},
    {"tasks", "figures"},
    {"pipeline"},
    {"diffusers_pipeline"},
    {"data"},
    {"evaluation"},
    {"train"},
    {"bench", "serve"},
    {"cli"},
    {"__main__"},
]


def imports(path):
    """The names a file imports, also inside functions; those under TYPE_CHECKING are types only."""
    tree = ast.parse(path.read_text())
    skip = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in skip:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def layer(name):
    found = [i for i, names in enumerate(LAYERS) if name in names]
    assert found, f"{name} has no layer: add it to LAYERS"
    return found[0]


def test_imports_run_one_way():
    for path in SOURCE.rglob("*.py"):
        own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        for module in imports(path):
            parts = module.split(".")
            if parts[0] != "arpg" or len(parts) == 1 or parts[1] == own:
                continue
            assert layer(parts[1]) < layer(own), f"{path.relative_to(SOURCE)} imports {module}"


def module_name(path):
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_import_cycles():
    """Imports inside functions count too: a module that can only be imported late belongs elsewhere."""
    paths = {module_name(path): path for path in SOURCE.rglob("*.py")}
    graph = {}
    for name, path in paths.items():
        wanted = (target if target in paths else target.rpartition(".")[0] for target in imports(path))
        graph[name] = {target for target in wanted if target in paths} - {"arpg"}
    seen, found = set(), []

    def visit(name, trail):
        if name in trail:
            found.append(" -> ".join([*trail[trail.index(name) :], name]))
        elif name not in seen:
            for target in sorted(graph[name]):
                visit(target, [*trail, name])
            seen.add(name)

    for name in graph:
        visit(name, [])
    assert found == []


def public_names(node, where):
    """Classes, functions and methods without a leading underscore, and whether each has a docstring."""
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            name = f"{where}.{child.name}"
            decorators = {getattr(each, "id", getattr(each, "attr", "")) for each in child.decorator_list}
            if not decorators & {"overload", "override", "setter"} and child.name != "forward":  # the class says it
                yield name, ast.get_docstring(child) is not None
            if isinstance(child, ast.ClassDef):
                yield from public_names(child, name)


def test_every_public_name_has_a_docstring():
    missing = []
    for path in sorted(SOURCE.rglob("*.py")):
        tree, name = ast.parse(path.read_text()), module_name(path)
        assert ast.get_docstring(tree), f"{path} has no docstring"
        missing += [public for public, documented in public_names(tree, name) if not documented]
    assert missing == []


def test_files_are_named_by_what_they_hold():
    assert [path for path in SOURCE.rglob("*.py") if path.stem in {"utils", "common", "helpers", "misc"}] == []
