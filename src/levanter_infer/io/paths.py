"""Names of local files."""

import os
from pathlib import Path


def local_path(given: str | Path, what: str) -> Path:
    """The path of a file that is given as a path, with ~ for the home directory, or as file:///PATH, which names
    characters as they are.

    Args:
        what: names the file in errors.
    Raises: ValueError for another URL.
    """
    scheme, separator, path = str(given).partition("://")
    if not separator or "/" in scheme:
        return Path(os.path.expanduser(given))  # `Path.expanduser` has no answer for users that do not exist
    if scheme.lower() != "file" or not path.startswith("/"):
        raise ValueError(
            f"{what} {given}: expected a local file, as a path or file:///PATH; levanter_infer.batch reads rows from "
            "URLs and writes rows to them"
        )
    return Path(path)
