"""A digest of the C++ sources, by which a library that was built from others is recognised.

Standard library only: `setup.py` runs this file by its path, before the package is installed.
"""

import hashlib
from pathlib import Path


def digest(folder: Path) -> str:
    """SHA-256 of the names and contents of a folder's C++ files, as hexadecimal digits."""
    sources = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in {".cc", ".h", ".inc"}):
        content = path.read_bytes()
        sources.update(f"{path.name}\0{len(content)}\0".encode())
        sources.update(content)
    return sources.hexdigest()
