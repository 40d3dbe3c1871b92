"""Fingerprints of everything beside the configuration that results depend on: weights, versions, flags, the device."""

import concurrent.futures
import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from levanter_infer.policies import CpuIsa
from levanter_infer.runtime.progress import stage

if TYPE_CHECKING:
    from levanter_infer.checkpoints.remote import RemoteFile
    from levanter_infer.checkpoints.source import Source

_PACKAGES = ("jax", "jaxlib", "equinox", "numpy", "tokenizers", "jinja2")
_FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_PER_PROCESS = (
    *("jax_compilation_cache", "jax_persistent_cache", "jax_cuda_visible", "jax_rocm_visible", "jax_dump_ir"),
    *("jax_log", "jax_debug_log", "jax_traceback", "jax_include_full_tracebacks", "jax_default_device"),
)
"""Prefixes of JAX settings that may differ between processes."""
_CODE = (".py", ".cpp", ".h", ".hpp", ".cc")


@stage("computing the SHA-256 of the weights")
def model_fingerprint(source: "Source") -> dict[str, str]:
    """SHA-256 of a checkpoint's weights, and of its configuration.

    For weights at a URL whose filesystem has checksums of the content (ETag, MD5), the SHA-256 of those, under another
    name; without such checksums all weights are read. A checkpoint of Levanter's trainer is identified by the manifest
    of its database, which names the data by random numbers, and by its metadata.
    """
    from levanter_infer.checkpoints.levanter import identifying_files, is_levanter
    from levanter_infer.checkpoints.source import CONFIG, MODELOPT_CONFIG

    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        names = identifying_files(source) if is_levanter(source) else sorted(source.shards())
        found = list(pool.map(lambda name: _identity(source.file(name)), names))
    weights = "".join(f"{name} {digest}\n" for name, (digest, _) in zip(names, found, strict=True))
    of_content = all(is_sha256 for _, is_sha256 in found)
    return {
        "name": source.name,
        "revision": source.revision or "",
        "weights_sha256" if of_content else "weights_checksums": hashlib.sha256(weights.encode()).hexdigest(),
        "config_sha256": _text_sha256(source, CONFIG),
        **({"modelopt_config_sha256": _text_sha256(source, MODELOPT_CONFIG)} if source.has(MODELOPT_CONFIG) else {}),
        **({} if source.adapter is None else _adapter_fingerprint(source.adapter)),
    }


def _adapter_fingerprint(adapter: "Source") -> dict[str, str]:
    from levanter_infer.checkpoints.source import ADAPTER_CONFIG, ADAPTER_WEIGHTS

    return {
        "adapter_name": adapter.name,
        "adapter_revision": adapter.revision or "",
        "adapter_weights": _identity(adapter.file(ADAPTER_WEIGHTS))[0],
        "adapter_config_sha256": _text_sha256(adapter, ADAPTER_CONFIG),
    }


def _text_sha256(source: "Source", name: str) -> str:
    return hashlib.sha256(source.read_bytes(name, 2**22)).hexdigest()


def _identity(file: "Path | RemoteFile") -> tuple[str, bool]:
    """A digest of a file's content, and whether it is the SHA-256."""
    from levanter_infer.checkpoints.remote import identity

    return (_sha256(file), True) if isinstance(file, Path) else identity(file)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def package_version() -> str:
    """Version of this package; `0+unknown` if it is not installed."""
    try:
        return importlib.metadata.version("levanter-infer")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def version_fingerprint(more: Sequence[str] = ()) -> dict[str, str]:
    """Versions of the packages that compute and write results, and of `more`; of this one also a digest."""
    return {
        "levanter_infer": f"{package_version()}+{_code_sha256()[:12]}",
        "python": platform.python_version(),
        "haliax": haliax_version(),
        **{name: importlib.metadata.version(name) for name in (*_PACKAGES, *more)},
    }


def haliax_version() -> str:
    """Version of the package that is imported as `haliax`: `marin-haliax`, or `haliax` before Python 3.12."""
    for distribution in ("marin-haliax", "haliax"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    raise importlib.metadata.PackageNotFoundError("haliax")


def flag_fingerprint() -> dict[str, str]:
    """Settings that change how programs are compiled and run: JAX's own, and the flags of XLA."""
    import jax

    values = {name: str(value) for name, value in jax.config.values.items() if not name.startswith(_PER_PROCESS)}
    return {**values, **{name: os.environ.get(name, "") for name in _FLAG_VARIABLES}}


@functools.cache
def _code_sha256() -> str:
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in _CODE):
        digest.update(f"{path.relative_to(root).as_posix()} {_sha256(path)}\n".encode())
    return digest.hexdigest()


def device_fingerprint(cpu_isa: str = CpuIsa.AUTO) -> dict[str, Any]:
    """The hardware that computes results: other hardware may round differently.

    Args:
        cpu_isa: `engine.cpu_isa`; `auto` stands for the widest instruction set that the CPU kernels have here.
    """
    import jax

    from levanter_infer.kernels.cpu import bindings as cpu

    device = jax.devices()[0]
    own = ""
    if device.platform == "cpu" and cpu.available():
        own = cpu.isa() if cpu_isa == CpuIsa.AUTO else cpu_isa
    return {"platform": device.platform, "kind": device.device_kind, "devices": 1, "instructions": own}


def tokenizer_fingerprint(name: str, revision: str | None = None) -> dict[str, str]:
    """Name and fingerprint of a tokenizer; empty for a model without one."""
    from levanter_infer.checkpoints.source import resolve_source
    from levanter_infer.checkpoints.tokenizer import Tokenizer

    source = resolve_source(name, revision, weights=False)
    if not source.has("tokenizer.json"):
        return {"name": "", "sha256": ""}
    return {"name": source.name, "sha256": Tokenizer.from_source(source).fingerprint}


def flat(content: Any, path: str = "") -> dict[str, Any]:
    """Values by dotted key; lists and empty mappings count as values."""
    if not isinstance(content, Mapping) or not content:
        if isinstance(content, list) and content and all(isinstance(item, Mapping) for item in content):
            return {k: v for i, item in enumerate(content) for k, v in flat(item, f"{path}[{i}]").items()}
        return {path: content}
    values: dict[str, Any] = {}
    for key, value in content.items():
        values |= flat(value, f"{path}.{key}" if path else str(key))
    return values
