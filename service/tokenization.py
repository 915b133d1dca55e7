"""Text to token ids and back, around the model's own tokenizer. Runs in the API process, without torch."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from service.errors import CheckpointError, InvalidRequest

_REPLACEMENT = "\ufffd"

# A character has at most four bytes, so at most three tokens can end inside one. More pending tokens than
# this mean that the model really produced bytes that are no text.
_MAX_PENDING_TOKENS = 8

_BYTE_PIECE = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


def keep_torch_out() -> None:
    """Stop transformers from importing torch in this process, where it is not loaded yet.

    A server's API process needs the tokenizer alone; torch would add 130 MB and over a second to the start.
    transformers imports torch wherever it finds it, and offers no switch. Child processes are not affected.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    # For this import alone, which would advise to install torch: the engine process inherits the environment.
    variable = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    given = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        import transformers  # noqa: F401
    finally:
        del os.environ[variable]
        if given is not None:
            os.environ[variable] = given


class Tokenizer:
    """The model's tokenizer: encoding, chat template, decoding, and the bytes of single tokens.

    Attributes:
        vocab_size: number of token ids with a meaning; the model's matrix may have more rows.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size: int = len(tokenizer)
        self._added: dict[int, str] = {
            token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items()
        }
        # Arguments of the library's own, which are not for clients to set.
        self._template_arguments = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)
        self._special: set[int | str] = set()
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token.special:
                self._special |= {token_id, token.content}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = "" if backend is None else json.dumps(json.loads(backend.to_str()).get("decoder"))
        self._byte_level = "ByteLevel" in decoder
        self._byte_fallback = "ByteFallback" in decoder
        self._piece_text: dict[int, bytes] = {}

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Load from a checkpoint directory. No remote code, no network.

        Raises:
            CheckpointError: there is no tokenizer, or its files are broken.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            # The library raises anything from OSError to a Rust panic's wrapper, depending on the file.
            reason = str(error).strip().splitlines()
            raise CheckpointError(
                f"{path}: the tokenizer cannot be loaded: {reason[0] if reason else type(error).__name__}. "
                "Expected tokenizer.json (and tokenizer_config.json) beside config.json"
            ) from error
        return cls(tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the model's own leading and trailing special tokens if wanted."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint brings a chat template."""
        return bool(self._tokenizer.chat_template)

    def template_text(self, *, with_tools: bool = False) -> str:
        """The template for such a conversation; a checkpoint may bring one for tools alone."""
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            names = ("tool_use", "default") if with_tools else ("default", "tool_use")
            template = next((template[name] for name in names if name in template), "")
        return template or ""

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Render messages with the model's template (in transformers' jinja sandbox) and encode the result.

        Args:
            messages: the conversation.
            add_generation_prompt: begin the assistant's answer.
            continue_final_message: end within the last message, which the output continues.
            tools: function definitions for the template.
            variables: further variables for it.

        Raises:
            InvalidRequest: the model has no template, or its template refuses these messages.
        """
        for name in variables or ():
            if name in self._template_arguments or not name.isidentifier():
                raise InvalidRequest(
                    f"{name[:80]!r} is no variable of a template", param="chat_template_kwargs"
                )
        if not self.has_chat_template:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions instead", param="messages"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=None if tools is None else list(tools),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(variables or {}),
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise InvalidRequest(
                f"the model's chat template does not accept these messages: {error}", param="messages"
            ) from error
        # The template writes the special tokens itself.
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the tokens, special tokens left out unless wanted, nothing cleaned up."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def is_special(self, token: int | str) -> bool:
        """Whether this id or this text is a special token, one that `decode` leaves out."""
        return token in self._special

    @property
    def spaces_depend_on_context(self) -> bool:
        """Whether a token's leading space is dropped where it stands first in what is decoded."""
        return not self._byte_level

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, which may be a part of a character; empty for an unused id."""
        known = self._piece_text.get(token_id)
        if known is None:
            known = self._piece_text[token_id] = self._compute_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """One token for people: its text, or `bytes:\\xe2\\x82` where its bytes are no whole characters."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _compute_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        if token_id >= self.vocab_size:
            return b""
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            return bytes(
                _BYTE_OF_CHARACTER[character] for character in piece if character in _BYTE_OF_CHARACTER
            )
        if self._byte_fallback and (match := _BYTE_PIECE.match(piece)):
            return bytes([int(match[1], 16)])
        return str(piece).replace("▁", " ").encode()


class IncrementalDetokenizer:
    """Turns one sequence's tokens into text as they arrive.

    The pieces join to `Tokenizer.decode` of all tokens. A character whose bytes are spread over tokens comes
    out whole, with its last token; bytes that never form a character come out as U+FFFD at the end.

    Args:
        skip_special_tokens: leave special tokens out.
        after: tokens that come before and whose text is shown already.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, after: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = list(after)
        # Tokens [context, read) are decoded again as left context (a piece's leading space depends on it);
        # `_shown` characters of decode(ids[context:]) are already out.
        self._context = 0
        self._read = len(self._ids)
        self._shown = len(self._decode().rstrip(_REPLACEMENT)) if self._ids else 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that is now complete."""
        self._ids.extend(token_ids)
        text = self._decode()
        pending = len(self._ids) - self._read > _MAX_PENDING_TOKENS
        if not text.endswith(_REPLACEMENT) or pending:
            piece = text[self._shown :]
            self._context, self._read = self._read, len(self._ids)
            self._shown = len(self._decode())
            return piece
        whole = text.rstrip(_REPLACEMENT)
        piece = whole[self._shown :]
        self._shown = max(self._shown, len(whole))
        return piece

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids[self._context :], skip_special_tokens=self._skip)

    def flush(self) -> str:
        """The sequence is over: returns what was held back."""
        text = self._decode()
        piece = text[self._shown :]
        self._shown = len(text)
        return piece


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, inverted: character -> byte."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + offset): byte for offset, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHARACTER = _byte_level_alphabet()
