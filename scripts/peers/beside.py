"""transformers, datasets and lm-eval import beside us in one process, and both sides encode and sample the tiny model.

Run by `scripts/compat.sh` in an environment that has them.
"""

import importlib.metadata

import datasets
import lm_eval
import torch
import transformers

from levanter_infer import EngineConfig, InferenceEngine, Request, SamplingParams, load_model

MODEL = "models/tiny"


def main() -> None:
    prompts = [f"{a}+{b}=" for a, b in ((17, 25), (3, 4), (88, 11), (50, 49))]
    model, tokenizer = load_model(MODEL, dtype="float32")
    theirs = transformers.AutoTokenizer.from_pretrained(MODEL)
    hf = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    engine = InferenceEngine(model, tokenizer, EngineConfig(max_seqs=4, max_seq_len=64))
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    count = worst = 0
    for output in engine.generate([Request(prompt, sampling=sampling) for prompt in prompts]):
        assert output.prompt_token_ids == theirs(output.prompt)["input_ids"], output
        tokens = output.completions[0].token_ids
        ids = torch.tensor([output.prompt_token_ids + tokens])
        logits = hf(ids).logits[0, len(output.prompt_token_ids) - 1 : -1].detach()
        assert logits.argmax(-1).tolist() == tokens, output
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].numpy()
        worst = max(worst, float(abs(logprobs - output.completions[0].logprobs).max()))
        count += len(tokens)
    rows = datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    print(
        f"{len(rows)} rows of datasets {datasets.__version__}, lm-eval {importlib.metadata.version(lm_eval.__name__)}"
    )
    print(f"{count}/{count} tokens as transformers {transformers.__version__}, max difference of logprobs {worst:.1e}")
    assert worst < 1e-4


if __name__ == "__main__":
    main()
