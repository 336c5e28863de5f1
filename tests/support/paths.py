"""Where the repository and the golden files are."""

from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
GOLDEN = ROOT / "tests" / "golden"
