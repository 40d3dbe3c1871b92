"""Compare many requests bit by bit: alone, and in random batches, chunk sizes, page sizes, pools and cache states.

Samples, beam searches, and samples that go on from one another; preempted, and computed again or moved to the host's
memory and back.

    python scripts/compare_bits.py --comparisons 10000
    python scripts/compare_bits.py --family gemma2 --comparisons 1500
    python scripts/compare_bits.py --form xla    # in the blocks of a TPU, by XLA on this CPU
    python scripts/compare_bits.py --digest      # SHA-256 of what each engine gives, to compare two versions

Prints one JSON line, and exits with 1 if any comparison fails. `--digest` prints a line per backend and configuration
instead: the same requests in the same rounds, so that versions whose lines are equal schedule alike and compute the
same bits.
"""

import argparse
import collections
import hashlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.engine.comparisons import Blocks, Resampling, all_kinds, expected, make_engine, serve  # noqa: E402
from tests.family_cases import case_of  # noqa: E402
from tests.golden_cases import load_case, write_checkpoint  # noqa: E402

from levanter_infer.checkpoints.load import load_model  # noqa: E402

CONFIGS = (
    dict(max_seqs=8, page_size=4, max_step_tokens=16, max_pages=26),
    dict(max_seqs=16, page_size=16, max_step_tokens=64, max_pages=9, max_round_steps=7),
    dict(max_seqs=4, page_size=8, max_step_tokens=5, max_pages=13),
    dict(max_seqs=32, page_size=8, max_step_tokens=300),
    dict(max_seqs=12, page_size=4, max_step_tokens=33, prefix_cache=False, max_pages=36),
    dict(max_seqs=10, page_size=8, max_step_tokens=24, max_pages=22, preempt="offload"),
)
FORMS: dict[str, Blocks | None] = {
    "cpu": None,
    "xla": Blocks(),
    "tpu": Blocks(matmul="tpu_interpret", attention="tpu_interpret"),
    "gpu": Blocks("gpu", matmul="gpu_interpret", attention="gpu_interpret"),
}
_COLD = 0.4
"""Probability that an engine forgets all pages before a round of comparisons."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=10000)
    parser.add_argument("--requests", type=int, default=250, help="in each round of comparisons; default 250")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--family", help="a family of the registry, by its golden case; default: the tiny Llama")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--form",
        choices=FORMS,
        default="cpu",
        help="cpu (default): the kernels for CPUs; xla: the blocks of a TPU in XLA; tpu, gpu: the kernels for these in "
        "Pallas' interpreter, slowly",
    )
    parser.add_argument("--digest", action="store_true", help="digests of one round of comparisons per engine")
    args = parser.parse_args()
    if args.digest:
        return digests(args.dtype, args.requests, args.seed)
    start, compared, differing, rounds = time.time(), 0, 0, 0
    some = family(args.family, args.dtype) if args.family else {"with_beams": True}
    some |= {"blocks": FORMS[args.form]}
    alone = make_engine(args.dtype, **some, max_seqs=4, page_size=8, max_step_tokens=256, prefix_cache=False)
    engines = [make_engine(args.dtype, **some, **{"prefix_cache": None, **config}) for config in CONFIGS]
    rng, kinds = np.random.default_rng(args.seed), collections.Counter()
    while compared < args.comparisons:
        cases = all_kinds(args.requests, seed=args.seed + rounds)
        if args.family:  # not every family has searches
            cases = [each for each in cases if isinstance(each, Resampling) or each.sampling.num_beams == 1]
        plain = {id(case): expected(alone, case, None) for case in cases if not isinstance(case, Resampling)}
        for engine in engines:
            if rng.random() < _COLD:
                engine.reset()
            order = [cases[i] for i in rng.permutation(len(cases))]
            for case, (found, starts) in zip(order, serve(engine, order), strict=True):
                differing += found != (plain.get(id(case)) or expected(alone, case, starts))
                kinds["resampled"] += starts is not None
                kinds["searches"] += not isinstance(case, Resampling) and case.sampling.num_beams > 1
            compared += len(cases)
        rounds += 1
    names = ("preemptions", "offloaded_pages", "prefix_hits", "forks", "copied_pages")
    totals = {name: sum(engine.stats()[name] for engine in engines) for name in names}
    line = {"compared": compared, "differing": differing, **kinds, **totals, "dtype": args.dtype, "family": args.family}
    line |= {"form": args.form}
    print(json.dumps({**line, "seconds": round(time.time() - start)}))
    return 1 if differing else 0


def family(name: str, dtype: str) -> dict[str, Any]:
    """The model of a family's golden case, as an argument of `make_engine`."""
    with tempfile.TemporaryDirectory() as directory:
        path = write_checkpoint(Path(directory), load_case(case_of(name)))
        return {"model": load_model(path, dtype=dtype)[0]}


def digests(dtype: str, num_requests: int, seed: int) -> int:
    """Print a digest per backend and configuration; rounds are bounded by steps alone, so that time decides nothing."""
    cases = all_kinds(num_requests, seed=seed)
    for name, numerics in (("xla", "default"), ("cpu", "batch_invariant")):
        for number, config in enumerate(CONFIGS):
            fixed = dict(numerics=numerics, attention=name, matmul=name, max_round_steps=6, max_round_seconds=3600)
            engine = make_engine(dtype, with_beams=True, **{**config, **fixed})
            digest = hashlib.sha256()
            for served in serve(engine, cases):
                digest.update(repr(served).encode())
            counts = {key: engine.stats()[key] for key in ("preemptions", "forks", "prefix_hits", "offloaded_pages")}
            line = {"backend": name, "config": number, "dtype": dtype, **counts, "digest": digest.hexdigest()}
            print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
