"""The cost of constraints: a step of a batch with them beside one of an engine without, in turns, on one machine.

python scripts/constrained_cost.py --model smollm2 --rounds 7          # scripts/peers/smollm2.py makes the checkpoint
python scripts/constrained_cost.py --grammar --rounds 5                # masks from the host, one step a round

Prints, for each kind of sampling and share of constrained sequences, the median of the ratios of a round's pairs.
"""

import argparse
import statistics
import time

from levanter_infer import EngineConfig, InferenceEngine, SamplingParams, load_model

LETTERS, LONGEST = "[ a-zA-Z,.]", 16
"""Letters of a token, at most: a text of so many times `--tokens` has as many tokens at least, or the script ends."""
SAMPLING = {"greedy": {"temperature": 0.0}, "top_p": {"temperature": 1.0, "top_p": 0.95}}
EVERY = {"every sequence": 1, "every other one": 2, "none": 0}


def seconds(engine: InferenceEngine, asked: list[SamplingParams]) -> float:
    begin = time.perf_counter()
    outputs = engine.generate(["Once upon a time"] * len(asked), asked)
    took = time.perf_counter() - begin
    for output, params in zip(outputs, asked, strict=True):
        if output.error or len(output.completions[0].token_ids) != params.max_tokens:
            raise SystemExit(output.error or f"a sample ended before its {params.max_tokens} tokens")
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/tiny")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seqs", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--grammar", action="store_true", help="masks from the host instead of an automaton")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model, dtype=args.dtype)
    config = EngineConfig(max_seqs=args.seqs, max_seq_len=args.tokens + 32)
    plain = InferenceEngine(model, tokenizer, config)
    constrained = InferenceEngine(model, tokenizer, config, constraints=True)
    plain.warmup()
    constrained.warmup()
    regex = f"{LETTERS}{{{LONGEST * args.tokens}}}"
    constraint = {"grammar": f"start: /{regex}/"} if args.grammar else {"regex": regex}
    for name, options in SAMPLING.items():
        same = {"max_tokens": args.tokens, **options}
        free = [SamplingParams(seed=i, ignore_eos=True, **same) for i in range(args.seqs)]
        ratios: dict[str, list[float]] = {share: [] for share in EVERY}
        steps = []
        for number in range(args.rounds + 1):
            for share, every in EVERY.items():
                asked = [
                    SamplingParams(seed=i, **same, **constraint) if every and i % every == 0 else free[i]
                    for i in range(args.seqs)
                ]
                runs, took = [(plain, free), (constrained, asked)], [0.0, 0.0]
                for which in (0, 1) if number % 2 else (1, 0):
                    took[which] = seconds(*runs[which])
                if number:  # the first warms all
                    ratios[share].append(took[1] / took[0])
                    steps.append(took[0] / args.tokens)
        found = ", ".join(f"{share} {statistics.median(each):.3f}" for share, each in ratios.items())
        print(f"{name}: {found}; a step without constraints {1e3 * statistics.median(steps):.2f} ms", flush=True)


if __name__ == "__main__":
    main()
