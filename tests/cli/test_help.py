"""Help, version and typos without torch, groups of verbs, brackets, former names of options, and Ctrl-C."""

import re
import subprocess
import sys

import pytest
import typer
from typer.main import get_command

from arpg import __version__, cli
from arpg.cli.options import FORMER_NAMES, Verb, VerbGroup
from arpg.cli.verbs import GROUPS, PANELS
from support.command import check_error

HEAVY = ("torch", "numpy", "PIL", "huggingface_hub", "safetensors")


def commands():
    """Every visible command: its words and the command."""
    root = get_command(cli.app)
    for name, command in root.commands.items():
        if not command.hidden:
            yield (name,), command
            yield from (((name, child), under) for child, under in getattr(command, "commands", {}).items())


def process(code, *arguments):
    """Run `code` and then `arpg ARGUMENTS` in a new process."""
    program = f"import sys; sys.argv[0] = 'arpg'\n{code}"
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_version_and_typos_do_not_import_torch():
    """One process for all of them: what the first imports, the last would show."""
    lines = [["--help"], ["--version"], ["generat"], ["generate", "--stepz", "3"], ["generate", "--steps", "many"]]
    lines += [[*words, "--help"] for words, _ in commands()]
    code = f"""
from arpg.cli import main
for line in {lines!r}:
    sys.argv[1:] = line
    try:
        main()
    except SystemExit:
        pass
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    result = process(code)
    assert result.stdout.splitlines()[-1] == "[]", result.stdout[-500:] + result.stderr
    assert "Traceback" not in result.stderr


def test_version(run):
    assert run("--version") == (0, f"arpg {__version__}\n", "")


def test_the_help_is_grouped(run):
    code, out, _ = run("--help")
    assert code == 0
    panels = re.findall(r"─ (\w+) ─", out)
    assert panels == ["Options", "Create", "Inspect", "Train", "Evaluate", "Serve"]
    assert tuple(panels[1:]) == tuple(PANELS)
    above = out[: out.index("─ Options")]
    assert "Generate, edit and study images" in " ".join(above.split())
    for words, command in commands():
        if len(words) == 1:
            assert f" {words[0]} " in out
            assert command.rich_help_panel in PANELS
    assert set(GROUPS) <= set(get_command(cli.app).commands)


def test_typos_are_one_line_with_a_suggestion(run):
    check_error(run("generat"), "'generat'", "generate")
    check_error(run("generate", "--stepz", 3), "--stepz", "--steps")


def test_every_option_has_help_and_shows_its_default(run):
    for words, command in commands():
        for param in command.params:
            assert param.help, f"{words}: {param.name}"
    out = re.sub(r"[│\s]+", " ", run("edit", "--help")[1])
    assert "[default: (the model's)]" in out
    assert "[default: out.png]" in out


def test_brackets_in_help_are_text(capsys):
    """Rich takes them for markup."""
    app = typer.Typer(cls=VerbGroup)

    @app.command("one", cls=Verb)
    def one(n: int = typer.Option(1, help="Images as uint8 [n, H, W, 3] of arpg[serve].")) -> None:
        """Read [bold] or [/bold]."""

    @app.command("two", cls=Verb)
    def two() -> None:
        """Nothing."""

    for line in (["--help"], ["one", "--help"]):
        app(line, standalone_mode=False)
        shown = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
        assert "Read [bold] or [/bold]." in shown
    assert "[n, H, W, 3] of arpg[serve]." in shown


def test_help_of_npz_files_keeps_its_brackets(run):
    assert "[n, H, W, 3]" in re.sub(r"[│\s]+", " ", run("evaluate", "--help")[1])


def test_files_are_named_by_output_everywhere():
    for words, command in commands():
        flags = [flag for param in command.params for flag in param.opts]
        assert not set(flags) & set(FORMER_NAMES), words
        assert ("-o" in flags) == ("--output" in flags), words
        assert ("-n" in flags) == ("--num" in flags), words
    writing = {words[0] for words, command in commands() if any("--output" in param.opts for param in command.params)}
    assert writing >= {"generate", "edit", "plan", "score", "sample", "sweep", "evaluate", "train", "tokenize", "bench"}


def test_former_names_are_accepted(run, folder, tmp_path):
    """Each is hidden, and means what its new name means."""
    plan = ("plan", "--grid", "4x4", "--steps", 2)
    assert run(*plan, "--out", tmp_path / "a.png")[0] == 0
    assert run(*plan, f"--out={tmp_path / 'b.png'}")[0] == 0
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    check_error(run("generate", "-c", 0, "--dtype", "int3", "-m", folder), "precision is 'int3'")
    check_error(run("expand", "--way", "up", "--size", "9x9"), "method is 'up'")
    check_error(run("bench", "--most", 0), "max-seconds is 0")
    check_error(run("serve", "--queue", "x"), "--max-pending-requests")
    check_error(run("evaluate", folder, "--reference", folder, "--json", tmp_path), "is a folder")
    inside = folder / "config.json" / "out.json"
    check_error(run("evaluate", folder, "--reference", folder, "--json", inside), "config.json is a file")
    check_error(run("score", "x.png", "--map", tmp_path), "is a folder")


@pytest.mark.parametrize("module", ["typer", "torch", "arpg.cli.verbs"])
def test_interrupted_imports_are_one_line(module):
    code = f"""
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from arpg.cli import main
main()
"""
    result = process(code, "info")
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "arpg: interrupted\n")


def test_an_interrupted_callback_is_one_line():
    """Python ignores it with a traceback, and goes on."""
    code = """
import weakref
import arpg.cli.verbs as verbs
from arpg.cli import main
class Thing: pass
def interrupt(_):
    raise KeyboardInterrupt
def run():
    thing = Thing()
    finalizer = weakref.ref(thing, interrupt)
    del thing
    return 0
verbs.run = run
main()
"""
    result = process(code)
    assert (result.returncode, result.stderr) == (130, "arpg: interrupted\n")
