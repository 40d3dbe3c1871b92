"""A digest of the C++ sources, by which a library that was built from others is recognised.

Standard library only: `setup.py` runs this file by its path, before the package is installed.
"""

import hashlib
from importlib.resources.abc import Traversable


def digest(folder: Traversable) -> str:
    """SHA-256 of the names and contents of a folder's C++ files, as hexadecimal digits."""
    sources = hashlib.sha256()
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if not path.name.endswith((".cc", ".h", ".inc")):
            continue
        content = path.read_bytes()
        sources.update(f"{path.name}\0{len(content)}\0".encode())
        sources.update(content)
    return sources.hexdigest()
