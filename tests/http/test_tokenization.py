"""Text and tokens: whole characters, the bytes of single tokens, broken files."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from service.errors import CheckpointError
from service.tokenization import IncrementalDetokenizer, Tokenizer

from .tiny_tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """A SentencePiece-like tokenizer, as Llama 2's: metaspace, and single bytes for what it does not know."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁the",
        "▁cat",
        "s",
        "é",
    ]
    backend = Backend(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"))


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*(detokenizer.push([token]) for token in ids), detokenizer.flush()]


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_pieces_join_to_the_text(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    got = pieces(tokenizer, ids)

    assert "".join(got) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in got)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 399), max_size=80))
def test_pieces_of_any_tokens_join_to_their_decoding(tokenizer, ids):
    ids = [token for token in ids if token < tokenizer.vocab_size]

    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="é日🦊 thecat", max_size=30))
def test_pieces_join_with_byte_fallback_too(byte_fallback, text):
    backend_ids = [3 + byte for byte in text.encode()]
    got = pieces(byte_fallback, backend_ids)

    assert "".join(got) == byte_fallback.decode(backend_ids)
    assert not any("\ufffd" in piece for piece in got)


def test_a_leading_space_stays_between_words(byte_fallback):
    the, cat = 260, 261

    assert pieces(byte_fallback, [the, cat, the]) == ["the", " cat", " the", ""]


def test_the_pieces_may_hold_several_tokens(tokenizer):
    ids = tokenizer.encode("naïve 🦊 日本語")
    detokenizer = IncrementalDetokenizer(tokenizer)
    got = [detokenizer.push(ids[start : start + 3]) for start in range(0, len(ids), 3)]

    assert "".join(got) + detokenizer.flush() == "naïve 🦊 日本語"


def test_endless_bytes_that_are_no_text_are_not_held_back_for_ever(tokenizer):
    continuation = tokenizer.encode("🦊")[-1]
    detokenizer = IncrementalDetokenizer(tokenizer)
    shown = [detokenizer.push([continuation]) for _ in range(100)]

    assert "\ufffd" in "".join(shown[:20])
    assert "".join(shown) + detokenizer.flush() == "\ufffd" * 100


def test_special_tokens_are_not_shown(tokenizer):
    ids = [0, *tokenizer.encode("one two"), 1]

    assert "".join(pieces(tokenizer, ids)) == "one two"


def test_the_bytes_of_tokens_join_to_the_text(tokenizer):
    text = "naïve 🦊 ok"

    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode() == text


def test_the_bytes_of_tokens_with_byte_fallback(byte_fallback):
    assert byte_fallback.token_bytes(260) == b" the"
    assert byte_fallback.token_bytes(3 + 0xE2) == b"\xe2"
    assert byte_fallback.token_text(3 + 0xE2) == "bytes:\\xe2"
    assert byte_fallback.token_text(263) == "é"
    assert byte_fallback.token_text(1) == "<s>"


def test_an_id_beyond_the_vocabulary_has_no_bytes(tokenizer):
    assert tokenizer.token_bytes(10**6) == b""


@pytest.mark.parametrize("damage", ["missing", "truncated", "nonsense"])
def test_broken_files_are_named(tmp_path, damage):
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:500])
    else:
        file.write_text(json.dumps({"version": "1.0"}))

    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)


def test_remote_code_is_not_run(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": [None, "evil.Evil"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with contextlib.suppress(CheckpointError):
        Tokenizer.load(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_the_api_process_needs_no_torch(checkpoint):
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from service.tokenization import Tokenizer, keep_torch_out\n"
        "keep_torch_out()\n"
        "import service.api.server\n"
        "tokenizer = Tokenizer.load(Path(sys.argv[1]))\n"
        "print(tokenizer.apply_chat_template([{'role': 'user', 'content': 'hi'}])[:0], sys.modules['torch'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(checkpoint)], capture_output=True, text=True, timeout=120, check=True
    )

    assert done.stdout.strip() == "[] None"
