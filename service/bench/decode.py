"""`lacunar bench decode`: tokens per second of decoding, side by side in one run on the same weights.

Contenders take turns in rounds (order reversed every other round) and the median round counts, so that a
drift of the machine's speed touches all of them alike. Decoding is timed from the first generated token to
the last; prefill and loading are not part of it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console
from rich.table import Table

import kernels_ext
from service.engine.client import EngineClient
from service.engine.config import EngineConfig
from service.engine.protocol import SamplingParams
from service.errors import SettingsError
from service.model.checkpoint import Checkpoint, TensorEntry
from service.pruning.pack import unpack

from .gguf_writer import write_f16_gguf

_CONTENDERS = ("transformers-fp32", "transformers-bf16", "engine-dense", "engine-bitmap", "llama.cpp-f16")
_SEED = 7


@dataclass(frozen=True, kw_only=True)
class DecodeBenchOptions:
    """What to time.

    Attributes:
        model: a packed model directory (as `lacunar prune` writes) or a dense one.
        batches: sequences decoded together.
        prompt_tokens, new_tokens: length of each prompt and of each continuation.
        rounds: how often each contender runs; the median counts.
        threads: CPU threads, the same for every contender.
        only: names of the contenders to run, or empty for all that are installed.
        json_out: where to write the figures, or None.
    """

    model: Path
    device: str = "cpu"
    batches: tuple[int, ...] = (1, 8)
    prompt_tokens: int = 32
    new_tokens: int = 64
    rounds: int = 3
    threads: int = 0
    only: tuple[str, ...] = ()
    json_out: Path | None = None


@dataclass(frozen=True, kw_only=True)
class DecodeFigures:
    """One contender at one batch size; `weight_bytes` are read once per step and shared by its tokens."""

    contender: str
    batch: int
    tokens_per_second: float
    weight_bytes_per_token: float
    read_bytes_per_second: float
    read_bandwidth_share: float
    rounds_tokens_per_second: list[float] = field(default_factory=list)


class Contender(Protocol):
    """Something that decodes. `weight_bytes` is what one step reads of the weights."""

    name: str
    weight_bytes: int

    async def open(self) -> None:
        """Load the model."""

    async def decode_seconds(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Generate exactly `new_tokens` for every prompt; seconds from the first token to the last."""
        ...

    async def close(self) -> None:
        """Free the model."""


class _Engine:
    def __init__(self, name: str, model: Path, weights: str, options: DecodeBenchOptions) -> None:
        self.name = name
        self.weight_bytes = 0
        self._config = EngineConfig(
            model=str(model),
            device=options.device,
            dtype="bfloat16",
            weights=weights,
            max_num_sequences=max(options.batches),
            max_model_len=options.prompt_tokens + options.new_tokens,
            threads=options.threads,
            enable_prefix_caching=False,
        )
        self._runs = 0

    async def open(self) -> None:
        self._client = await EngineClient.start(self._config)
        self.weight_bytes = self._client.info.stored_bytes

    async def decode_seconds(self, prompts: list[list[int]], new_tokens: int) -> float:
        self._runs += 1
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        self._client.admit(len(prompts))
        first: list[float] = []
        last: list[float] = []

        async def follow(index: int, prompt: list[int]) -> None:
            begin: float | None = None
            count = 0
            stream = self._client.generate(f"bench-{self._runs}-{index}", prompt, sampling)
            async for output in stream:
                count += len(output.token_ids)
                begin = begin or time.perf_counter()
            assert count == new_tokens
            assert begin is not None
            first.append(begin)
            last.append(time.perf_counter())

        await asyncio.gather(*(follow(i, p) for i, p in enumerate(prompts)))
        # Prompts are admitted one after another; decoding of the full batch begins with the last first token.
        return max(last) - max(first)

    async def close(self) -> None:
        await self._client.stop()


class _Transformers:
    def __init__(self, name: str, dense: Path, dtype: torch.dtype, options: DecodeBenchOptions) -> None:
        self.name = name
        self.weight_bytes = 0
        self._dense = dense
        self._dtype = dtype
        self._device = options.device

    async def open(self) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self._dense, dtype=self._dtype).to(self._device).eval()
        self._model = model
        # The embedding's row look-up is negligible; the tied matrix is read whole as the output head.
        embedding = model.get_input_embeddings().weight
        tied = model.get_output_embeddings().weight is embedding
        total = sum(p.numel() for p in model.parameters()) - (0 if tied else embedding.numel())
        self.weight_bytes = total * self._dtype.itemsize

    async def decode_seconds(self, prompts: list[list[int]], new_tokens: int) -> float:
        from transformers import LogitsProcessorList

        marks: list[float] = []

        def mark(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            marks.append(time.perf_counter())
            return scores

        ids = torch.tensor(prompts, device=self._device)
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                logits_processor=LogitsProcessorList([mark]),
            )
        assert len(marks) == new_tokens
        return marks[-1] - marks[0]

    async def close(self) -> None:
        del self._model


class _LlamaCpp:
    """llama.cpp through llama-cpp-python's low-level binding, on a float16 GGUF of the same weights."""

    def __init__(self, name: str, gguf_file: Path, options: DecodeBenchOptions) -> None:
        self.name = name
        self.weight_bytes = 0
        self._file = gguf_file
        self._options = options

    async def open(self) -> None:
        import llama_cpp

        self._lib = llama_cpp
        # Kept on the instance: llama.cpp holds the pointer for as long as it lives.
        self._silent_log = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
        llama_cpp.llama_log_set(self._silent_log, None)
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0 if self._options.device == "cpu" else -1
        self._model = llama_cpp.llama_model_load_from_file(str(self._file).encode(), model_params)
        assert self._model, f"llama.cpp could not load {self._file}"
        params = llama_cpp.llama_context_default_params()
        sequences = max(self._options.batches)
        params.n_ctx = (self._options.prompt_tokens + self._options.new_tokens) * sequences
        params.n_batch = max(512, self._options.prompt_tokens * sequences)
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self._options.threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        assert self._context, "llama.cpp could not make a context"
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self.weight_bytes = llama_cpp.llama_model_size(self._model)

    async def decode_seconds(self, prompts: list[list[int]], new_tokens: int) -> float:
        lib, context = self._lib, self._context
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        batch = lib.llama_batch_init(sum(map(len, prompts)), 0, 1)
        rows: list[bool] = []
        for sequence, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                is_last = position == len(prompt) - 1
                _put(batch, len(rows), token, position, sequence, logits=is_last)
                rows.append(is_last)
        batch.n_tokens = len(rows)
        assert lib.llama_decode(context, batch) == 0
        outputs = [row for row, wanted in enumerate(rows) if wanted]
        tokens = [self._greedy(row) for row in outputs]
        begin = time.perf_counter()
        for step in range(1, new_tokens):
            for sequence, token in enumerate(tokens):
                position = len(prompts[sequence]) + step - 1
                _put(batch, sequence, token, position, sequence, logits=True)
            batch.n_tokens = len(tokens)
            assert lib.llama_decode(context, batch) == 0
            tokens = [self._greedy(row) for row in range(len(tokens))]
        seconds = time.perf_counter() - begin
        lib.llama_batch_free(batch)
        return seconds

    def _greedy(self, row: int) -> int:
        import numpy as np

        logits = self._lib.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())

    async def close(self) -> None:
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)


def _put(batch: object, row: int, token: int, position: int, sequence: int, *, logits: bool) -> None:
    batch.token[row] = token  # type: ignore[attr-defined]
    batch.pos[row] = position  # type: ignore[attr-defined]
    batch.n_seq_id[row] = 1  # type: ignore[attr-defined]
    batch.seq_id[row][0] = sequence  # type: ignore[attr-defined]
    batch.logits[row] = logits  # type: ignore[attr-defined]


def run(options: DecodeBenchOptions, console: Console | None = None) -> list[DecodeFigures]:
    """Time every contender, print the table, write the JSON. An unknown contender is a SettingsError."""
    unknown = set(options.only) - set(_CONTENDERS)
    if unknown:
        raise SettingsError(
            f"bench decode: unknown contender {sorted(unknown)}; known are {', '.join(_CONTENDERS)}"
        )
    threads = options.threads or torch.get_num_threads()
    options = DecodeBenchOptions(**{**asdict(options), "threads": threads})
    torch.set_num_threads(threads)
    console = console or Console()
    with tempfile.TemporaryDirectory(prefix="lacunar-bench-") as scratch:
        figures = asyncio.run(_measure(options, Path(scratch), console))
    return figures


async def _measure(options: DecodeBenchOptions, scratch: Path, console: Console) -> list[DecodeFigures]:
    with console.status("Measuring the machine's read bandwidth"):
        bandwidth = kernels_ext.measure_read_bandwidth()
    with console.status("Writing the dense weights that the others read"):
        contenders = _contenders(options, scratch, console)
    vocab_size = json.loads((options.model / "config.json").read_text())["vocab_size"]
    generator = torch.Generator().manual_seed(_SEED)
    seconds: dict[tuple[str, int], list[float]] = {}
    for contender in contenders:
        with console.status(f"Loading {contender.name}"):
            await contender.open()
    try:
        for batch in options.batches:
            prompts = torch.randint(vocab_size, (batch, options.prompt_tokens), generator=generator).tolist()
            for turn in range(options.rounds + 1):  # the first warms caches and is not counted
                for contender in contenders if turn % 2 == 0 else contenders[::-1]:
                    label = f"batch {batch}, round {turn} of {options.rounds}: {contender.name}"
                    with console.status(label):
                        taken = await contender.decode_seconds(prompts, options.new_tokens)
                    if turn:
                        seconds.setdefault((contender.name, batch), []).append(taken)
    finally:
        for contender in contenders:
            await contender.close()
    figures = [
        _figures(contender, batch, seconds[contender.name, batch], options.new_tokens, bandwidth)
        for batch in options.batches
        for contender in contenders
    ]
    _report(figures, options, bandwidth, console)
    return figures


def _contenders(options: DecodeBenchOptions, scratch: Path, console: Console) -> list[Contender]:
    """The contenders that are wanted and installed; what is left out is printed with its reason."""
    wanted = options.only or _CONTENDERS
    dense = options.model
    with Checkpoint.open(options.model) as checkpoint:
        plain = all(isinstance(entry, TensorEntry) for entry in checkpoint.entries.values())
    if not plain:
        dense = scratch / "dense"
        unpack(options.model, dense)
    makers: dict[str, Callable[[str], Contender]] = {
        "transformers-fp32": lambda name: _Transformers(name, dense, torch.float32, options),
        "transformers-bf16": lambda name: _Transformers(name, dense, torch.bfloat16, options),
        "engine-dense": lambda name: _Engine(name, options.model, "dense", options),
        "engine-bitmap": lambda name: _Engine(name, options.model, "auto", options),
    }
    if "llama.cpp-f16" in wanted:
        if importlib.util.find_spec("llama_cpp") is None:
            console.print("llama.cpp-f16 is left out: llama-cpp-python is not installed.")
        else:
            gguf_file = scratch / "model-f16.gguf"
            write_f16_gguf(dense, gguf_file)
            makers["llama.cpp-f16"] = lambda name: _LlamaCpp(name, gguf_file, options)
    return [make(name) for name, make in makers.items() if name in wanted]


def _figures(
    contender: Contender, batch: int, seconds: list[float], new_tokens: int, bandwidth: float
) -> DecodeFigures:
    steps = new_tokens - 1
    rates = [steps * batch / s for s in seconds]
    rate = statistics.median(rates)
    read = contender.weight_bytes * rate / batch
    return DecodeFigures(
        contender=contender.name,
        batch=batch,
        tokens_per_second=rate,
        weight_bytes_per_token=contender.weight_bytes / batch,
        read_bytes_per_second=read,
        read_bandwidth_share=read / bandwidth,
        rounds_tokens_per_second=rates,
    )


def _report(
    figures: list[DecodeFigures], options: DecodeBenchOptions, bandwidth: float, console: Console
) -> None:
    table = Table(title=f"Decoding {options.model.name}: {options.threads} threads, "
                        f"read bandwidth {bandwidth / 1e9:.1f} GB/s")  # fmt: skip
    for column in ("contender", "batch", "tokens/s", "MB weights/token", "GB/s", "of bandwidth"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for row in figures:
        table.add_row(
            row.contender,
            str(row.batch),
            f"{row.tokens_per_second:.1f}",
            f"{row.weight_bytes_per_token / 1e6:.1f}",
            f"{row.read_bytes_per_second / 1e9:.1f}",
            f"{row.read_bandwidth_share:.0%}",
        )
    console.print(table)
    if options.json_out:
        record = {
            "what": "lacunar bench decode",
            "options": {**asdict(options), "model": options.model.name, "json_out": None},
            "machine": {
                "platform": platform.platform(),
                "processor": _processor(),
                "isa": kernels_ext.cpu_isa(),
                "torch": torch.__version__,
                "read_bytes_per_second": bandwidth,
            },
            "figures": [asdict(row) for row in figures],
        }
        options.json_out.write_text(json.dumps(record, indent=1) + "\n")
        console.print(f"Written to {options.json_out}")


def _processor() -> str:
    """The processor's name as Linux gives it, or the platform's word for it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
