"""Small tokenizers of the two kinds that models have, written as an HF model directory has them."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_level(*, bos: bool = False) -> Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it: 256 bytes, a few merges, three special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|bos|>", "<|eos|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the end. ëé ☃☃ 猫 hello hello world"] * 3, trainer)
    tokenizer.add_tokens([AddedToken("wörd ☃", special=False)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
        )
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Words with a leading "▁", and bytes for everything else, as Llama 2 has it."""
    words = ["▁", "▁hello", "▁world", "!", "é", "a", "b", ".", "▁a"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    vocab |= {word: 259 + i for i, word in enumerate(words)}
    merges: list[tuple[str, str]] = []
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def llama2(*, bos: bool = True) -> Tokenizer:
    """As Llama 2's files are: a `Prepend` normalizer, merges, and the start of a sequence in the post-processor."""
    pieces = ["▁", "▁▁", "l", "lo", "h", "he", "hel", "hello", "▁hello", "w", "x", "▁x", "[", "]", "I", "▁["]
    pieces += ["IN", "INST", "N", "S", "T", "ST", "e", "o", "r", "d", "/", "é", "[I"]
    merges = [("l", "o"), ("h", "e"), ("he", "l"), ("hel", "lo"), ("▁", "hello"), ("▁", "x"), ("I", "N"), ("S", "T")]
    merges += [("IN", "ST"), ("▁", "▁"), ("▁", "[")]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    vocab |= {piece: 259 + i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def write(directory: Path, tokenizer: Tokenizer, **files: dict | str) -> Path:
    """Write tokenizer.json and further files; `tokenizer_config={...}` writes tokenizer_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        if isinstance(content, str):
            (directory / f"{name}.jinja").write_text(content)
        else:
            (directory / f"{name}.json").write_text(json.dumps(content))
    return directory
