"""A login node has no torch: everything that looks at a run works there."""

import subprocess
import sys
from pathlib import Path

import slipstream.observe


def test_observe_imports_without_torch():
    names = sorted(path.stem for path in Path(slipstream.observe.__file__).parent.glob("*.py") if path.stem != "__init__")
    modules = ", ".join(f"slipstream.observe.{name}" for name in names)
    subprocess.run([sys.executable, "-c", f"import sys; sys.modules['torch'] = None; import {modules}"], check=True)
