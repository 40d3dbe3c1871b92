"""lm-evaluation-harness: the model `levanter-infer` beside the harness' own `hf`, on the same documents, in turn.

    .venv-hf/bin/pip install torch==2.13.0 transformers 'lm_eval[hf]>=0.4.13' . && \\
        .venv-hf/bin/python scripts/peers/harness.py --model models/tiny

Prints one JSON line: seconds of each turn, the ratio of medians (above 1 where the engine is faster), the largest
differences between log likelihoods, and whether the texts are equal. Both sides are in one process, in float32, with as
many threads as there are processors. `--hf-batch` lists the batch sizes of `hf`; the fastest one counts.
"""

import argparse
import json
import random
import statistics
import time

from lm_eval.api.instance import Instance

WORDS = "a the one fox dog boat house tree king girl went saw had took found came over under into with and".split()


def documents(count: int, seed: int = 0) -> list[str]:
    """Texts of 8 to 60 words, each after one of eight prefixes, as few-shot prompts share theirs."""
    rng = random.Random(seed)
    heads = [" ".join(rng.choices(WORDS, k=24)) for _ in range(8)]
    return [f"{rng.choice(heads)} {' '.join(rng.choices(WORDS, k=rng.randint(8, 60)))}." for _ in range(count)]


def tasks(count: int, answers: int, new_tokens: int) -> dict[str, list[tuple]]:
    """Arguments of the harness' requests by kind: `count` documents with `answers` each, whole texts, and prompts."""
    rng, texts = random.Random(1), documents(count)
    ends = [f" {' '.join(rng.choices(WORDS, k=rng.randint(1, 4)))}" for _ in range(count * answers)]
    gen = {"until": ["\n\n"], "max_gen_toks": new_tokens, "do_sample": False}
    return {
        "loglikelihood": [(texts[i // answers], end) for i, end in enumerate(ends)],
        "loglikelihood_rolling": [(text,) for text in texts],
        "generate_until": [(text, gen) for text in texts],
    }


def run(lm, kind: str, arguments: list[tuple]) -> tuple[float, list]:
    """Seconds, and results."""
    requests = [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]
    begin = time.perf_counter()
    results = getattr(lm, kind)(requests, disable_tqdm=True)
    return time.perf_counter() - begin, results


def differences(kind: str, ours: list, theirs: list) -> dict:
    """How far results are apart."""
    if kind == "generate_until":
        return {"equal_texts": sum(a == b for a, b in zip(ours, theirs, strict=True)), "of": len(ours)}
    if kind == "loglikelihood":
        greedy = sum(bool(a[1]) == bool(b[1]) for a, b in zip(ours, theirs, strict=True))
        ours, theirs = ([each[0] for each in side] for side in (ours, theirs))
        return differences("", ours, theirs) | {"equal_greedy": greedy, "of": len(ours)}
    apart = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return {"largest": max(apart), "largest_relative": max(d / abs(b) for d, b in zip(apart, theirs, strict=True))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="models/tiny")
    parser.add_argument("--documents", type=int, default=256)
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-seqs", type=int, default=32)
    parser.add_argument("--max-seq-len", type=int, default=256)
    parser.add_argument("--hf-batch", default="1,8,32")
    args = parser.parse_args()

    from lm_eval.models.huggingface import HFLM

    from levanter_infer import EngineConfig, InferenceEngine, load_model
    from levanter_infer.lm_eval import EngineLM

    config = EngineConfig(max_seqs=args.max_seqs, max_seq_len=args.max_seq_len)
    ours = EngineLM(InferenceEngine(*load_model(args.model, dtype="float32"), config))
    theirs = HFLM(pretrained=args.model, dtype="float32", device="cpu", max_length=ours.max_length)
    sizes = [int(each) for each in args.hf_batch.split(",")]
    for kind, arguments in tasks(args.documents, args.answers, args.new_tokens).items():
        _, found = run(ours, kind, arguments)  # compiles
        if args.repeats == 0:
            theirs.batch_size_per_gpu = sizes[-1]
            print(json.dumps({"kind": kind, **differences(kind, found, run(theirs, kind, arguments)[1])}))
            continue
        speeds = {}
        for size in sizes:
            theirs.batch_size_per_gpu = size
            run(theirs, kind, arguments[:32])
            speeds[size] = run(theirs, kind, arguments)[0]
        theirs.batch_size_per_gpu = min(speeds, key=speeds.__getitem__)
        seconds: dict[str, list[float]] = {"ours": [], "hf": []}
        for _ in range(args.repeats):
            for name, lm in (("ours", ours), ("hf", theirs)):
                ours._engine.reset()  # no prefix stays from the last turn
                took, results = run(lm, kind, arguments)
                seconds[name].append(took)
                found = results if name == "ours" else found
        report = {"kind": kind, "hf_batch": theirs.batch_size_per_gpu, "seconds": seconds}
        report["ratio"] = statistics.median(seconds["hf"]) / statistics.median(seconds["ours"])
        print(json.dumps(report | differences(kind, found, results)), flush=True)


if __name__ == "__main__":
    main()
