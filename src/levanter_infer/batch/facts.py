"""What a job's results depend on beside its configuration: fingerprints, versions, the device."""

import concurrent.futures
import functools
import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from levanter_infer.batch import tables

if TYPE_CHECKING:
    from levanter_infer.checkpoints.source import Source

_PACKAGES = ("jax", "jaxlib", "haliax", "equinox", "numpy", "tokenizers", "jinja2")
_CODE = (".py", ".cpp", ".h", ".hpp", ".cc")


def model_facts(source: "Source") -> dict[str, str]:
    """SHA-256 of a checkpoint's weights, and of its configuration."""
    from levanter_infer.checkpoints.source import CONFIG

    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        names = sorted(source.shards())
        digests = pool.map(lambda name: _sha256(source.file(name)), names)
        weights = "".join(f"{name} {digest}\n" for name, digest in zip(names, digests, strict=True))
    return {
        "name": source.name,
        "revision": source.revision or "",
        "weights_sha256": hashlib.sha256(weights.encode()).hexdigest(),
        "config_sha256": _sha256(source.file(CONFIG)),
    }


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def version_facts(*, parquet: bool) -> dict[str, str]:
    """Versions of what computes and writes results; of this package also what its files are."""
    packages = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {
        "levanter_infer": f"{importlib.metadata.version('levanter-infer')}+{_code_sha256()[:12]}",
        "python": platform.python_version(),
        **packages,
        **({"pyarrow": tables.version()} if parquet else {}),
    }


@functools.cache
def _code_sha256() -> str:
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in _CODE):
        digest.update(f"{path.relative_to(root).as_posix()} {_sha256(path)}\n".encode())
    return digest.hexdigest()


def device_facts() -> dict[str, Any]:
    """What the results were computed on: other hardware may round otherwise."""
    import jax

    from levanter_infer.kernels import cpu

    device = jax.devices()[0]
    own = cpu.isa() if device.platform == "cpu" and cpu.available() else ""
    return {"platform": device.platform, "kind": device.device_kind, "devices": 1, "instructions": own}
