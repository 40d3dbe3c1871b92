"""Speculative decoding by prompt lookup: tokens per second of a real model, with and without it, one after the other.

    python scripts/speculation.py MODEL [--drafts 0,4,8] [--batch 1,4,8] [--max-seqs 16] [--repeats 5] [--lookup-min 3]

MODEL: a directory, such as that of scripts/peers/smollm2.py. Three kinds of greedy requests of 96 tokens: texts that
are to be repeated, JSON by a schema, and stories. Printed are tokens per second, prompts included, as medians with
their range; tokens of a step; the share of the draft tokens that was accepted; and how many samples have the tokens of
the first column.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src")]

from levanter_infer import EngineConfig, InferenceEngine, Request, SamplingParams, load_model  # noqa: E402

TEXTS = (
    "The committee met for six hours, heard twelve speakers, could not agree on a budget, and decided to meet again "
    "next week, when the mayor will attend. The treasurer, Ms. Alvarez, said that the town's reserves would last "
    "until March, and that repairs of the bridge on Mill Street could not wait any longer than that.",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n\n\ndef variance(values):\n    centre = mean(values)\n    total = 0\n"
    "    for value in values:\n"
    "        total += (value - centre) ** 2\n    return total / len(values)\n",
    "The ferry leaves Harwich at 09:15 and arrives at Hoek van Holland at 17:15. Foot passengers board until 08:30, "
    "cars until 08:00. Bicycles are free of charge from October to March, and 5 euros in summer. Dogs travel in cars, "
    "or in one of the twenty cabins on deck 9 that are kept for them.",
    "Ingredients: 200 g flour, 3 eggs, 120 g butter, 150 g sugar, 1 teaspoon baking powder, 50 ml milk. Beat the "
    "butter and the sugar until they are pale, add the eggs one by one, and then the flour with the baking powder and "
    "the milk. Bake for 40 minutes at 180 degrees.",
)
HEROES = ("a fox in Rome", "a baker in a lighthouse", "a robot in the desert", "a nurse in a village")
KINDS = {
    "copy": [f"Repeat the following text word for word:\n\n{text}" for text in TEXTS],
    "json": [f"List the facts in this text as JSON, each with a subject and a value:\n\n{text}" for text in TEXTS],
    "story": [f"Write a story about {hero}." for hero in HEROES],
}
SCHEMA = {
    "type": "array",
    "minItems": 6,
    "items": {
        "type": "object",
        "properties": {"subject": {"type": "string", "maxLength": 30}, "value": {"type": "string", "maxLength": 40}},
        "required": ["subject", "value"],
    },
}
"""Of the answers of kind "json"."""
TOKENS = 96


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per second with and without speculative decoding.")
    parser.add_argument("model")
    parser.add_argument("--drafts", default="0,4,8", help="values of engine.num_speculative_tokens")
    parser.add_argument("--batch", default="1,4,8", help="requests at a time")
    parser.add_argument("--max-seqs", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lookup-min", type=int, help="engine.prompt_lookup_min")
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments.model, dtype="bfloat16")
    sizes = dict(max_seqs=arguments.max_seqs, max_seq_len=1024, prefix_cache=False)

    def engine_of(drafts: int) -> InferenceEngine:
        lookup = {"prompt_lookup_min": arguments.lookup_min} if drafts else {}
        return InferenceEngine(model, tokenizer, EngineConfig(**sizes, num_speculative_tokens=drafts, **lookup))

    engines = {drafts: engine_of(drafts) for drafts in map(int, arguments.drafts.split(","))}
    for kind, texts in KINDS.items():
        for batch in map(int, arguments.batch.split(",")):
            chats = [[{"role": "user", "content": texts[i % len(texts)]}] for i in range(batch)]
            compare(kind, [Request(messages=chat) for chat in chats], engines, arguments.repeats)


def compare(kind: str, requests: list[Request], engines: dict[int, InferenceEngine], repeats: int) -> None:
    schema = SCHEMA if kind == "json" else None
    rates: dict[int, list[float]] = {drafts: [] for drafts in engines}
    shown, first = {}, None
    for repeat in range(repeats + 1):
        for drafts, engine in engines.items():
            before, begin = engine.stats(), time.perf_counter()
            outputs = engine.generate(requests, SamplingParams(max_tokens=TOKENS, temperature=0, json_schema=schema))
            seconds, after = time.perf_counter() - begin, engine.stats()
            tokens = [output.completions[0].token_ids for output in outputs]
            first = tokens if first is None else first
            names = ("generated_tokens", "steps", "draft_tokens", "accepted_tokens")
            made, steps, drafted, accepted = (after[name] - before[name] for name in names)
            same = sum(own == other for own, other in zip(tokens, first, strict=True))
            share = accepted / drafted if drafted else 0
            shown[drafts] = f"{made / steps:.2f} tokens a step, {share:.0%} accepted, {same} of {len(requests)} equal"
            if repeat:  # the first compiles
                rates[drafts].append(made / seconds)
    for drafts, found in rates.items():
        rate = f"{np.median(found):7.0f} ({min(found):.0f}-{max(found):.0f}) tokens/s"
        print(f"{kind:6s} {len(requests):3d} requests, {drafts:2d} draft tokens: {rate}, {shown[drafts]}", flush=True)


if __name__ == "__main__":
    main()
