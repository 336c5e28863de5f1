"""The shape of the code base: imports run one way, files stay short and say what they are."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "arpg"

# Each may import what stands before it (and its own package). Nothing imports cli.
LAYERS = [
    {"errors"},
    {"files", "config", "classes", "storage"},
    {"device", "image", "text"},
    {"canvas", "kernels", "animation", "cpu", "packed"},
    {"tokenizer", "model"},
    {"checkpoint", "precision"},
    {"convert"},
    {"hub"},
    {"decode", "control"},
    {"tasks", "grid_picture", "windows"},
    {"stages", "likelihood"},
    {"drawing", "overlap"},
    {"pipeline"},
    {"data"},
    {"evaluation"},
    {"train"},
    {"bench", "serve"},
    {"cli"},
]


def imports(path):
    """The arpg modules a file imports, also inside functions; those under TYPE_CHECKING are types only."""
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
            if node.module == "arpg":
                yield from (f"arpg.{alias.name}" for alias in node.names)
            else:
                yield node.module
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


def test_files_say_what_they_are_and_stay_short():
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text)), f"{path} does not say what it is"
        assert len(text.splitlines()) <= 400, f"{path} is long: look for the second idea in it"
        assert path.stem not in {"utils", "common", "helpers", "misc"}
