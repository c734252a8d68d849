"""Copies the PTX of a folder with one fault: block-scaled mma.sync gets the scales of b for those of a.

A calibration program must fail with that PTX, which shows that its verification depends on the scale mapping.

python swap_scales.py FOLDER COPY
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# The last operands: scales of a, their selector, scales of b, their selector.
_SCALES = re.compile(r"(mma\.sync\S*\.ue4m3 .*?),\s*\{(%\w+)\}(,\s*\{[^}]*\},\s*)\{(%\w+)\}(,\s*\{[^}]*\};)")


def main(source: str, copy: str) -> None:
    replaced = 0
    Path(copy).mkdir(parents=True, exist_ok=True)
    for path in Path(source).glob("*.ptx"):
        text, count = _SCALES.subn(r"\1, {\4}\3{\2}\5", path.read_text())
        (Path(copy) / path.name).write_text(text)
        replaced += count
    if replaced == 0:
        sys.exit(f"{source}: no block-scaled mma.sync was found")


if __name__ == "__main__":
    main(*sys.argv[1:])
