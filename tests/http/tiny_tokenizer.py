"""Writes a small byte-level BPE tokenizer, of the kind most models use, with a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

_TEXT = [
    "one two three four five six seven eight nine ten",
    "the quick brown fox jumps over the lazy dog and the server streams its tokens one by one",
    "stop here and do not stop there; user assistant system message",
]
_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['content'] == 'refuse me' %}{{ raise_exception('this template refuses that') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(path: Path, *, vocab_size: int = 400) -> None:
    """Make `path` with tokenizer.json, its config and a generation_config.json. Id 0 begins, id 1 ends."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": _TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"top_k": 7, "eos_token_id": 1}))
