"""`python -m levanter_infer.bench.one_start MODEL LAUNCHED`: load a model, sample a token, print times of the parts.

The program of each process of `bench startup`. LAUNCHED is the time of day, in seconds, at which it was launched.
"""

import json
import sys
import time

PARTS = ("interpreter_s", "import_s", "load_s", "engine_s", "compile_s", "first_token_s")
"""Parts of a start, in order."""
PROMPT = (1, 2, 3)


def main(model: str, launched: float) -> None:
    marks = [launched, time.time()]

    from levanter_infer.checkpoints.load import load_model
    from levanter_infer.engine.engine import InferenceEngine
    from levanter_infer.engine.params import SamplingParams
    from levanter_infer.engine.request import Request
    from levanter_infer.runtime.compile_cache import enable_compile_cache

    enable_compile_cache()
    marks.append(time.time())
    weights, tokenizer = load_model(model)
    marks.append(time.time())
    engine = InferenceEngine(weights, tokenizer, donate_model=True)
    marks.append(time.time())
    engine.warmup()
    marks.append(time.time())
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    (output,) = engine.generate([Request(prompt_token_ids=list(PROMPT), sampling=sampling)])
    marks.append(time.time())
    times = {part: end - begin for part, begin, end in zip(PARTS, marks, marks[1:], strict=False)}
    print(json.dumps({**times, "total_s": marks[-1] - launched, "output": output.completions[0].token_ids}))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
