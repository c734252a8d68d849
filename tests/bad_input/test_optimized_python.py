"""``python -O`` removes assert statements; every check must still raise, with the same text."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import bad_cases
import fp4gemm

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import bad_cases
if __debug__:
    sys.exit("assertions are on: this is not python -O")
texts = {f"{case.function} {case.kind}": bad_cases.complaint(case) for case in bad_cases.CASES}
failed = [f"{name}: {text}" for name, text in texts.items() if text]
print(len(bad_cases.CASES))
sys.exit("\\n".join(failed) or 0)
"""


def test_bad_input_under_python_O() -> None:
    command = [sys.executable, "-O", "-c", SCRIPT, str(Path(bad_cases.__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(bad_cases.CASES)


def test_the_package_has_no_assert_statement() -> None:
    """No check of the package is an assert statement, which ``python -O`` would remove."""
    package = Path(fp4gemm.__file__).parent
    found = [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
    ]
    assert found == []
