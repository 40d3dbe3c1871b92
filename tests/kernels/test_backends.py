"""A backend is one object per platform: what the code above may know of it, and what every backend agrees on."""

import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from levanter_infer.kernels.backend import Task, Work
from levanter_infer.kernels.call import PoolShape
from levanter_infer.kernels.registry import BACKENDS, IMPLEMENTATIONS, PLATFORMS, make_backend, platform_of
from levanter_infer.policies import AttentionImpl, MatmulImpl

SOURCE = Path(__file__).resolve().parents[2] / "src" / "levanter_infer"
FOLDERS = {path.parent.name for path in (SOURCE / "kernels").glob("*/__init__.py")}
FLAGS = re.compile(
    r"\bimpl (==|!=|in|not in) |\.impl (==|!=)"
    r"|\b(on_cpu|for_tpu|for_cpu|for_gpu|as_bits|skips_rows|TPU_POOL|tpu_pool)\b"
    r"|\b(PanelLinear|GpuLinear|LinearMap)\b|\b(attention|matmul|name)(\.name)? (==|!=) \"(cpu|gpu|tpu|xla|reference)\""
    r"|isinstance\([^)]*(Xla|Cpu|Gpu|Tpu|Reference)Backend"
)


def flags_in(text: str) -> list[str]:
    return [match[0] for match in FLAGS.finditer(text)]


def is_backend(parts: tuple[str, ...]) -> bool:
    """Whether a file of these path parts belongs to a platform's folder."""
    return len(parts) > 2 and parts[0] == "kernels" and parts[1] in FOLDERS


def test_the_code_above_asks_the_backend_and_not_for_its_name():
    files = [path for path in SOURCE.rglob("*.py") if not is_backend(path.relative_to(SOURCE).parts)]
    found = {str(path.relative_to(SOURCE)): flags_in(path.read_text()) for path in files}
    assert len(files) > 100 and not {name: flags for name, flags in found.items() if flags}
    assert len(flags_in('if spec.impl == "cpu" and self.on_cpu or backend.attention == "tpu": LinearMap')) == 4


def test_models_and_layers_import_no_platforms_kernels():
    kernels = re.compile(r"levanter_infer\.kernels\.(cpu|gpu|tpu)\b")
    files = [path for part in ("models", "layers", "cache", "decode") for path in (SOURCE / part).rglob("*.py")]
    assert len(files) > 30 and not [str(path) for path in files if kernels.search(path.read_text())]


def test_every_platform_has_a_folder_and_a_line_in_the_registry():
    assert FOLDERS == {"xla", "cpu", "gpu", "tpu"} == set(BACKENDS) - {"reference"}
    assert all((SOURCE / "kernels" / folder / "backend.py").exists() for folder in FOLDERS)
    assert set(PLATFORMS) == {"cpu", "gpu", "tpu"} and platform_of("METAL").name == "METAL"
    for name in IMPLEMENTATIONS:
        backend = make_backend(name)
        assert backend == make_backend(name) and hash(backend) == hash(make_backend(name))
        assert name.removesuffix("_interpret") == backend.name
    with pytest.raises(ValueError, match='impl="metal" is unknown; use one of: reference, xla, cpu, gpu, tpu'):
        make_backend("metal")


def test_the_configuration_lists_the_backends():
    assert set(AttentionImpl) == {"auto", *BACKENDS}
    assert set(MatmulImpl) == {"auto", "xla", *(n for n, each in BACKENDS.items() if Work.MATMUL in each.kernels)}


class Device:
    platform, compute_capability = "METAL", "1.0"


@pytest.mark.parametrize("work", Work)
def test_an_unknown_platform_is_refused_by_all_but_xla(work):
    task = Task(work, Device(), jnp.dtype(jnp.float32))
    supporting = {name for name, backend in BACKENDS.items() if backend.supports(task)}
    assert supporting == {"xla", "reference"}
    assert BACKENDS["cpu"].refusal(task) == "this engine runs on METAL"


@pytest.mark.parametrize("name", sorted(IMPLEMENTATIONS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_pool_has_the_sizes_that_its_backend_says(name, dtype):
    shape, backend = PoolShape(2, 5, 4, kv_heads=2, head_dim=8, dtype=jnp.dtype(dtype)), make_backend(name)
    pool = backend.init_pool(shape)
    sizes = [pool.shape[backend.pool_order.index(axis)] for axis in (0, 1, 2)]
    assert pool.shape == backend.pool_shape(shape) and sizes == [2, 5, 4] and not pool.any()
    assert pool.dtype.itemsize == shape.dtype.itemsize
