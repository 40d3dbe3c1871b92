"""HF transformers' `generate` as one side of `run.py`. Runs in an environment without this package."""

import torch
from protocol import serve
from transformers import AutoModelForCausalLM


def load(setup: dict):
    torch.set_num_threads(setup["threads"])
    dtype = getattr(torch, setup["dtype"])
    return AutoModelForCausalLM.from_pretrained(setup["checkpoint"], dtype=dtype, attn_implementation="sdpa").eval()


def start(setup: dict):
    model = load(setup)

    @torch.inference_mode()
    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return result[:, ids.shape[1] :].tolist()

    return generate


if __name__ == "__main__":
    serve(start, ("torch", "transformers"))
