"""Compiles grammars in a process of its own, `python -m service.engine.grammar_compiler`; see grammar_client.

Each grammar is compiled in a fork that inherits the loaded library and tokenizer, and that is killed when it
takes too long or too much memory: a few bytes of grammar can ask for either, and the library has no limits.

Frames on standard input and output are a length of four bytes, big-endian, and that many bytes of msgpack.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import struct
import sys
import tempfile
import time
from typing import Any, Literal

import msgspec

GrammarKind = Literal["json_schema", "regex", "grammar", "structural_tag"]

_LENGTH = struct.Struct(">I")
_MEMORY_BYTES = 1024**3

# Spaces and line breaks between two parts of a JSON text. Without a bound a model may write them for ever.
_MAX_WHITESPACE = 20


class CompilerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """First frame to the process.

    Attributes:
        tokenizer: directory of the tokenizer.
        vocab_size: columns of the model's logits.
        eos_token_ids: tokens that end a complete text.
        seconds: longest time for one grammar.
        max_bytes: largest compiled grammar.
    """

    tokenizer: str
    vocab_size: int
    eos_token_ids: list[int]
    seconds: float
    max_bytes: int


class CompileGrammar(msgspec.Struct, frozen=True):
    """Every further frame to the process."""

    kind: GrammarKind
    source: str


class Vocabulary(msgspec.Struct, tag="vocabulary", frozen=True):
    """First frame from the process: it is ready, and this describes the tokenizer to the engine."""

    data: str


class Compiled(msgspec.Struct, tag="compiled", frozen=True):
    """A grammar in the form that the engine reads."""

    data: str


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """Why a grammar cannot be used, for the client that sent it."""

    message: str


FromCompiler = Vocabulary | Compiled | Refused


def main() -> None:
    """Serve until standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent decides, and tells by closing the pipe
        signal.signal(number, signal.SIG_IGN)
    options = msgspec.msgpack.decode(_read_frame() or b"", type=CompilerOptions)
    vocabulary = _vocabulary(options)
    _write_frame(Vocabulary(vocabulary.serialize_json()))
    while (frame := _read_frame()) is not None:
        request = msgspec.msgpack.decode(frame, type=CompileGrammar)
        _write_frame(_compile_in_fork(request, vocabulary, options))


def _vocabulary(options: CompilerOptions) -> Any:
    import xgrammar
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        options.tokenizer, local_files_only=True, trust_remote_code=False
    )
    return xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=options.vocab_size, stop_token_ids=options.eos_token_ids
    )


def _compile_in_fork(request: CompileGrammar, vocabulary: Any, options: CompilerOptions) -> FromCompiler:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.close(reader)
            _limit(options)
            reply = _compile(request, vocabulary, options)
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(msgspec.msgpack.encode(reply))
        os._exit(0)
    os.close(writer)
    deadline = time.monotonic() + options.seconds
    received = bytearray()
    complete = False
    while (left := deadline - time.monotonic()) > 0 and select.select([reader], [], [], left)[0]:
        part = os.read(reader, 1 << 16)
        if not part:
            complete = True
            break
        received += part
    os.close(reader)
    if not complete:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if not complete:
        return Refused(f"it takes longer than {options.seconds:g} s to compile; simplify it")
    if not received:
        return Refused(f"it needs more than {_MEMORY_BYTES // 1024**2} MiB of memory to compile; simplify it")
    answer: FromCompiler = msgspec.msgpack.decode(received, type=FromCompiler)
    return answer


def _limit(options: CompilerOptions) -> None:
    """For the fork: only so much memory, and whatever serves requests goes first."""
    os.nice(10)
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _compile(request: CompileGrammar, vocabulary: Any, options: CompilerOptions) -> FromCompiler:
    import numpy as np
    import xgrammar

    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
    # The library warns of parts that it leaves out and goes on. Nobody may believe that they work.
    with tempfile.TemporaryFile() as warnings:
        os.dup2(warnings.fileno(), sys.stderr.fileno())
        try:
            match request.kind:
                case "json_schema":
                    compiled = compiler.compile_json_schema(
                        request.source, max_whitespace_cnt=_MAX_WHITESPACE
                    )
                case "regex":
                    compiled = compiler.compile_regex(request.source)
                case "grammar":
                    compiled = compiler.compile_grammar(request.source)
                case "structural_tag":
                    compiled = compiler.compile_structural_tag(request.source)
            words = np.zeros((1, -(-options.vocab_size // 32)), dtype=np.int32)
            masked = xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(words, 0)
            data = compiled.serialize_json()
        except MemoryError:
            return Refused(
                f"it needs more than {_MEMORY_BYTES // 1024**2} MiB of memory to compile; simplify it"
            )
        except Exception as error:  # the library raises RuntimeError and ValueError of its own making
            return Refused(_reason(str(error)))
        warnings.seek(0)
        for line in warnings.read().decode(errors="replace").splitlines():
            if "Warning: " in line:
                return Refused(_reason(line.partition("Warning: ")[2]))
    if masked and not words.any():
        return Refused("it matches no text at all")
    if len(data) > options.max_bytes:
        return Refused(f"compiled it has {len(data)} bytes, but at most {options.max_bytes} are kept")
    return Compiled(data)


def _reason(text: str) -> str:
    """The library's message without its time and source line: ``[12:00:00] /a/b.cc:94: Message``."""
    line = " ".join(text.split())
    _, found, message = line.partition(".cc:")
    if found and line.startswith("["):
        line = message.partition(": ")[2]
    return line[:500] or "it is not valid"


def _read_frame() -> bytes | None:
    stream = sys.stdin.buffer
    head = stream.read(_LENGTH.size)
    return stream.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else None


def _write_frame(message: FromCompiler) -> None:
    sys.stdout.buffer.write(frame(message))
    sys.stdout.buffer.flush()


def frame(message: msgspec.Struct) -> bytes:
    """A message as it goes over the pipes."""
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


def frame_length(head: bytes) -> int:
    """How many bytes follow the first four."""
    length: int = _LENGTH.unpack(head)[0]
    return length


if __name__ == "__main__":
    main()
