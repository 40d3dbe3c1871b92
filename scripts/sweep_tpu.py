"""Compiles the attention of TPUs for many shapes, without a TPU, and says which do not compile.

    python scripts/sweep_tpu.py [--gens v4,v5e,v5p,v6e] [--paths decode,mixed] [--every N] [--out FILE.jsonl]

The whole sweep is 5 models × 5 page sizes × 4 context lengths × 3 numbers of sequences on 4 generations, 1200 cases of
a few seconds each. `--every 12` takes each twelfth. A case that is in FILE already is not compiled again. Compiling
happens in a process of its own, because the compiler may abort it; then the case counts as failed and the next process
goes on.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time

TOPOLOGIES = {
    "v4": ("v4:2x2x1", "v4-8"),
    "v5e": ("v5e:2x2", "v5litepod-4"),
    "v5p": ("v5p:2x2x1", "v5p-8"),
    "v6e": ("v6e:2x2", "v6e-4"),
}
HEADS = ((32, 8, 128), (64, 8, 128), (32, 8, 64), (16, 8, 128), (8, 4, 256))
PAGES, CONTEXTS, SEQUENCES = (16, 32, 64, 128, 256), (2048, 8192, 32768, 131072), (16, 64, 256)
CHUNK_TOKENS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gens", default=",".join(TOPOLOGIES))
    parser.add_argument("--paths", default="mixed", help="decode (one token per row), mixed (both paths)")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--out")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return _compile(options.child)
    done = _read(options.out)
    failed = [case for case in done.values() if case["error"]]
    for gen in options.gens.split(","):
        cases = [
            dict(gen=gen, path=path, heads=heads, page=page, context=context, seqs=seqs)
            for path, heads, page, context, seqs in itertools.product(
                options.paths.split(","), HEADS, PAGES, CONTEXTS, SEQUENCES
            )
        ][:: options.every]
        failed += _sweep(gen, [case for case in cases if json.dumps(case) not in done], options.out)
    for case in failed:
        print(json.dumps(case))
    print(f"{len(failed)} failed")
    sys.exit(bool(failed))


def _read(path: str | None) -> dict[str, dict]:
    if path is None or not os.path.exists(path):
        return {}
    with open(path) as file:
        results = [json.loads(line) for line in file]
    return {json.dumps({k: v for k, v in r.items() if k not in ("error", "seconds")}): r for r in results}


def _sweep(gen: str, cases: list[dict], out: str | None) -> list[dict]:
    """Compile `cases` in children, a new one after each that dies. Returns: those that failed."""
    environment = os.environ | {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": TOPOLOGIES[gen][1],
        "TPU_WORKER_HOSTNAMES": "localhost",
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    failed = []
    while cases:
        child = subprocess.Popen(
            [sys.executable, __file__, "--child", gen],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write("\n".join(map(json.dumps, cases)) + "\n")
        child.stdin.close()
        for line in child.stdout:
            if line.startswith("{"):
                failed += _note({**cases.pop(0), **json.loads(line)}, out)
        if child.wait() != 0 and cases:
            failed += _note({**cases.pop(0), "error": f"the compiler ended with {child.returncode}", "seconds": 0}, out)
    return failed


def _note(result: dict, out: str | None) -> list[dict]:
    print(json.dumps(result), flush=True)
    if out is not None:
        with open(out, "a") as file:
            file.write(json.dumps(result) + "\n")
    return [result] if result["error"] else []


def _compile(gen: str) -> None:
    """The child: cases on stdin, one line, one line of result each on stdout."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from levanter_infer.kernels import ragged_paged_attention
    from levanter_infer.kernels.tpu_pool import TpuPool

    devices = topologies.get_topology_desc(TOPOLOGIES[gen][0], "tpu").devices
    mesh = Mesh(np.asarray(devices[:1]), ("x",))

    def array(shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    for line in sys.stdin:
        case, start = json.loads(line), time.time()
        (q_heads, kv_heads, head_dim), page, seqs = case["heads"], case["page"], case["seqs"]
        layout = TpuPool(kv_heads, head_dim)
        row_pages = case["context"] // page
        page_bytes = layout.slabs * page * 128 * 2
        num_pages = min(seqs * row_pages, (2 << 30) // page_bytes)
        tokens = seqs if case["path"] == "decode" else max(seqs, CHUNK_TOKENS)
        arrays = dict(
            q=array((tokens, q_heads, head_dim), jnp.bfloat16),
            kv_pages=array(layout.shape(num_layers=1, num_pages=num_pages, page_size=page), jnp.bfloat16),
            layer=array(()),
            page_indices=array((seqs, row_pages)),
            seq_lens=array((seqs,)),
            cu_q_lens=array((seqs + 1,)),
            num_seqs=array(()),
        )

        def attend(arrays, kv_heads=kv_heads, head_dim=head_dim):
            return ragged_paged_attention(**arrays, kv_heads=kv_heads, scale=head_dim**-0.5, impl="tpu")

        error = None
        try:
            with jax.set_mesh(mesh):
                jax.jit(attend).trace(arrays).lower(lowering_platforms=("tpu",)).compile()
        except Exception as problem:  # the error is the result
            error = f"{type(problem).__name__}: {problem}"[:400]
        print(json.dumps(dict(error=error, seconds=round(time.time() - start, 1))), flush=True)


if __name__ == "__main__":
    main()
